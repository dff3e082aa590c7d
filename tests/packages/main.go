// Command packages applies the exported migrations as their users do: with goose and with golang-migrate. It is a module of
// its own, so that nobody else gets their dependencies.
//
//	go run ./tests/packages goose|golang-migrate DATABASE_URL DIRECTORY up|down
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"

	"github.com/golang-migrate/migrate/v4"
	database "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	_ "github.com/golang-migrate/migrate/v4/source/file" // reads the directory
	_ "github.com/jackc/pgx/v5/stdlib"                   // the driver "pgx"
	"github.com/pressly/goose/v3"
)

var tools = map[string]func(db *sql.DB, dir string, up bool) error{
	"goose":          withGoose,
	"golang-migrate": withMigrate,
}

func main() {
	if len(os.Args) != 5 || tools[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: packages goose|golang-migrate DATABASE_URL DIRECTORY up|down")
		os.Exit(2)
	}
	db, err := sql.Open("pgx", os.Args[2])
	if err == nil {
		err = tools[os.Args[1]](db, os.Args[3], os.Args[4] == "up")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func withGoose(db *sql.DB, dir string, up bool) error {
	provider, err := goose.NewProvider(goose.DialectPostgres, db, os.DirFS(dir))
	if err != nil {
		return err
	}
	if up {
		_, err = provider.Up(context.Background())
	} else {
		_, err = provider.DownTo(context.Background(), 0)
	}
	return err
}

func withMigrate(db *sql.DB, dir string, up bool) error {
	driver, err := database.WithInstance(db, &database.Config{})
	if err != nil {
		return err
	}
	migrator, err := migrate.NewWithDatabaseInstance("file://"+dir, "pgx5", driver)
	if err != nil {
		return err
	}
	if up {
		err = migrator.Up()
	} else {
		err = migrator.Down()
	}
	if errors.Is(err, migrate.ErrNoChange) {
		return nil
	}
	return err
}
