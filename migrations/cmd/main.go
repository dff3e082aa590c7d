// Command cmd installs pgratelimit into one database, or removes it with its policies and buckets. It also writes
// the files for psql, and shows a function as PostgreSQL gets it from sql/, with the line numbers of error messages.
//
//	go run ./migrations/cmd install postgres://…
//	go run ./migrations/cmd uninstall postgres://…
//	go run ./migrations/cmd psql migrations
//	go run ./migrations/cmd show ratelimit_acquire
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"

	"github.com/pgratelimit/pgratelimit/migrations"
)

var commands = map[string]func(ctx context.Context, argument string) error{
	"install":   func(ctx context.Context, url string) error { return run(ctx, url, migrations.Up) },
	"uninstall": func(ctx context.Context, url string) error { return run(ctx, url, migrations.Down) },
	"psql":      write,
	"show":      show,
}

func main() {
	if len(os.Args) != 3 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: cmd install|uninstall DATABASE_URL, cmd psql DIRECTORY, or cmd show FUNCTION")
		os.Exit(2)
	}
	if err := commands[os.Args[1]](context.Background(), os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, url string, migrate func(context.Context, *pgx.Conn) error) error {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return err
	}
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		fmt.Fprintf(os.Stderr, "%s: %s: %s %s\n", n.Severity, n.Message, n.Detail, n.Hint)
	}
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return migrate(ctx, conn)
}

func write(_ context.Context, dir string) error {
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

func show(_ context.Context, function string) error {
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
