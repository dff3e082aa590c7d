// Command packages applies migrations as the users of goose and of golang-migrate do. It is a module of its own, so that nobody else
// gets their dependencies.
//
//	go run ./tests/packages goose|golang-migrate DATABASE_URL DIRECTORY
package main

import (
	"context"
	"database/sql"
	"fmt"
	"os"

	"github.com/golang-migrate/migrate/v4"
	database "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	_ "github.com/golang-migrate/migrate/v4/source/file" // reads the directory
	_ "github.com/jackc/pgx/v5/stdlib"                   // the driver "pgx"
	"github.com/pressly/goose/v3"
)

var tools = map[string]func(db *sql.DB, dir string) error{
	"goose":          withGoose,
	"golang-migrate": withMigrate,
}

func main() {
	if len(os.Args) != 4 || tools[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: packages goose|golang-migrate DATABASE_URL DIRECTORY")
		os.Exit(2)
	}
	db, err := sql.Open("pgx", os.Args[2])
	if err == nil {
		err = tools[os.Args[1]](db, os.Args[3])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func withGoose(db *sql.DB, dir string) error {
	provider, err := goose.NewProvider(goose.DialectPostgres, db, os.DirFS(dir))
	if err != nil {
		return err
	}
	_, err = provider.Up(context.Background())
	return err
}

func withMigrate(db *sql.DB, dir string) error {
	driver, err := database.WithInstance(db, &database.Config{})
	if err != nil {
		return err
	}
	migrator, err := migrate.NewWithDatabaseInstance("file://"+dir, "pgx5", driver)
	if err != nil {
		return err
	}
	return migrator.Up()
}
