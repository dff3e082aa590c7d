// Command cmd installs pgratelimit into one database, or removes it with its policies and buckets.
//
//	go run ./migrations/cmd install postgres://…
//	go run ./migrations/cmd uninstall postgres://…
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
)

var commands = map[string]func(context.Context, *pgx.Conn) error{
	"install":   migrations.Up,
	"uninstall": migrations.Down,
}

func main() {
	if len(os.Args) != 3 || commands[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: cmd install|uninstall DATABASE_URL")
		os.Exit(2)
	}
	if err := run(context.Background(), os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, command, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return commands[command](ctx, conn)
}
