// Command cmd is for who changes pgratelimit: it writes the packages, and shows a function as PostgreSQL gets it from
// sql/, with the line numbers of error messages.
//
//	go run ./migrations/cmd packages build/packages
//	go run ./migrations/cmd release build/release
//	go run ./migrations/cmd citus citus.sql
//	go run ./migrations/cmd show ratelimit_acquire
//
// It is run in the root of the repository.
package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/jackc/tern/v2/migrate"

	"github.com/pgratelimit/pgratelimit/migrations/packages"
)

var commands = map[string]func(argument string) error{
	"packages": func(dir string) error { return write(dir, packages.All) },
	"release":  func(dir string) error { return write(dir, packages.Release) },
	"citus":    citus,
	"show":     show,
}

func main() {
	if len(os.Args) != 3 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: cmd packages|release DIRECTORY, cmd citus FILE, or cmd show FUNCTION")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// write makes files of the repository, and writes them into a directory.
func write(dir string, files func(fs.FS) (packages.Files, error)) error {
	made, err := files(os.DirFS("."))
	if err != nil {
		return err
	}
	for name, text := range made {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// citus prints a file of the package for Citus.
func citus(file string) error {
	files, err := packages.One(os.DirFS("."), "citus")
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(files["citus/"+file])
	return err
}

func show(function string) error {
	code, err := migrate.LoadCodePackage(os.DirFS("sql"))
	if err != nil {
		return err
	}
	text, err := code.Eval(nil)
	if err != nil {
		return err
	}
	name := regexp.QuoteMeta(function[strings.LastIndexByte(function, '.')+1:]) // an error names the schema, too
	body := regexp.MustCompile(`create or replace (?:function|procedure) (?:ratelimit\.)?` + name + `\([^$]*\$\$([^$]*)\$\$`)
	found := body.FindStringSubmatch(text)
	if found == nil {
		return fmt.Errorf("no function of sql/ is named %s", function)
	}
	// Line 1 is the rest of the line that ends in $$.
	for i, line := range strings.Split(found[1], "\n") {
		fmt.Printf("%4d  %s\n", i+1, line)
	}
	return nil
}
