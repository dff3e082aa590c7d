// Command cmd is for who changes pgratelimit: it writes the files for psql, and shows a function as PostgreSQL gets it from
// sql/, with the line numbers of error messages.
//
//	go run ./migrations/cmd psql migrations
//	go run ./migrations/cmd show ratelimit_acquire
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/jackc/tern/v2/migrate"

	"github.com/pgratelimit/pgratelimit/migrations"
)

var commands = map[string]func(argument string) error{
	"psql": write,
	"show": show,
}

func main() {
	if len(os.Args) != 3 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: cmd psql DIRECTORY, or cmd show FUNCTION")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func write(dir string) error {
	files, err := migrations.Psql(os.DirFS(dir))
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, "psql", name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	return nil
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
