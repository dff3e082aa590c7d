// Command uninstall removes pgratelimit, its policies and its buckets from one database.
//
//	go run ./migrations/uninstall postgres://…
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/pgratelimit/migrations"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: uninstall DATABASE_URL")
		os.Exit(2)
	}
	if err := uninstall(context.Background(), os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func uninstall(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	return migrations.Down(ctx, conn)
}
