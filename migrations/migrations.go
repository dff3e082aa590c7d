// Package migrations installs pgratelimit into a PostgreSQL database.
//
// It carries the files that the tern command line applies. The other ways to install read them, too, or are made of them by package
// migrations/packages, so that
//
//	psql -v ON_ERROR_STOP=1 -f migrations/psql/install.sql
//	cd migrations && go tool tern migrate
//
// CREATE EXTENSION and [Up] give the same schema.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"

	"github.com/pgratelimit/pgratelimit/sql"
)

// release is that of these files. The functions are in another module, which could be of a later one.
const release = "0.3.0"

// VersionTable records the installed schema version, in the schema that the package has for itself.
const VersionTable = "ratelimit.version"

//go:embed *.sql include snapshots
var frozen embed.FS

// files are those of this directory. The snapshot of a migration that is not released is a symbolic link to sql/, and
// links are not embedded.
type files struct{}

// Open opens a file of a snapshot that is not frozen in sql/ itself.
func (files) Open(name string) (fs.File, error) {
	file, err := frozen.Open(name)
	if in, ok := strings.CutPrefix(name, "snapshots/"); ok && errors.Is(err, fs.ErrNotExist) {
		_, in, _ = strings.Cut(in, "/")
		return sql.Files.Open(path.Join(".", in))
	}
	return file, err
}

// begin is what a transaction begins with that does a task: install or uninstall.
func begin(task string, known int) (string, error) {
	prepare, err := fs.ReadFile(files{}, "include/prepare.sql")
	return fmt.Sprintf("select pg_catalog.set_config('ratelimit.task', '%s', true), pg_catalog.set_config('ratelimit.known', '%d', true);\n%s", task, known, prepare), err
}

// A NewerSchemaError says that the database was installed by a later release of this package.
// Nothing was changed.
type NewerSchemaError struct {
	Installed int32 // the version found in the database
	Known     int32 // the newest version this release can install
}

func (e *NewerSchemaError) Error() string {
	return fmt.Sprintf("pgratelimit: schema version %d is installed and this release knows versions up to %d: upgrade the program", e.Installed, e.Known)
}

// Up installs the package, or brings an installed one up to date. The public functions go into the
// schema that heads the connection's search_path, and stay where an earlier install put them.
//
// Calling it again, or from many processes at once, is harmless: callers take turns under an
// advisory lock. Each migration is one transaction. The connection must be outside a transaction,
// and its role must own schema ratelimit, or be allowed to create schemas while that is not there.
// Any role that may read the version can call it where nothing is to be done. Settings made with SET
// are reset when something was installed. A newer schema than this release knows is left alone and
// reported as a [*NewerSchemaError].
func Up(ctx context.Context, conn *pgx.Conn) error {
	known, err := load()
	if err != nil {
		return err
	}
	prepare, err := begin("install", len(known))
	if err != nil {
		return err
	}
	if err := inTransaction(ctx, conn, prepare); err != nil {
		if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Message == "a newer schema is installed" {
			newer := &NewerSchemaError{Known: int32(len(known))}
			if err := conn.QueryRow(ctx, "select v.version from only "+VersionTable+" as v").Scan(&newer.Installed); err == nil {
				return newer
			}
		}
		return fmt.Errorf("pgratelimit: prepare schema ratelimit: %w", describe(err))
	}
	migrator, err := migrate.NewMigrator(ctx, conn, VersionTable)
	if err != nil {
		return fmt.Errorf("pgratelimit: prepare %s: %w", VersionTable, describe(err))
	}
	migrator.Migrations = known
	if err := migrator.Migrate(ctx); err != nil {
		return fmt.Errorf("pgratelimit: install: %w", describe(err))
	}
	return nil
}

// Down removes the package with all its policies and buckets, also a development version, as the owner of schema ratelimit and on
// a connection outside a transaction. Where it is not installed, nothing happens. The jobs of pg_cron/schedule.sql
// are removed too; a warning of the server says where they could not be.
func Down(ctx context.Context, conn *pgx.Conn) error {
	known, err := load()
	if err != nil {
		return err
	}
	prepare, err := begin("uninstall", len(known))
	if err != nil {
		return err
	}
	remove, err := fs.ReadFile(files{}, "include/remove.sql")
	if err != nil {
		return err
	}
	err = inTransaction(ctx, conn, prepare+string(remove)+"set local client_min_messages = warning; drop table if exists "+VersionTable+"; drop schema if exists ratelimit")
	if err != nil {
		return fmt.Errorf("pgratelimit: uninstall: %w", describe(err))
	}
	return nil
}

// load reads the migrations. The migrator needs no connection for that.
func load() ([]*migrate.Migration, error) {
	if sql.Version != release {
		return nil, fmt.Errorf("pgratelimit: the tables are of release %s and the functions of %s: go get github.com/pgratelimit/pgratelimit/migrations@v%[2]s", release, sql.Version)
	}
	migrator, err := migrate.NewMigrator(context.Background(), nil, VersionTable)
	if err == nil {
		err = migrator.LoadMigrations(files{})
	}
	if err != nil {
		return nil, fmt.Errorf("pgratelimit: load migrations: %w", err)
	}
	return migrator.Migrations, nil
}

// inTransaction runs SQL in a transaction of its own.
func inTransaction(ctx context.Context, conn *pgx.Conn, sql string) error {
	if conn.PgConn().TxStatus() != 'I' {
		return errors.New("the connection is inside a transaction: commit it first")
	}
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql)
		return err
	})
}

// describe adds what the server had to say beyond the message.
func describe(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Detail == "" && pgErr.Hint == "" {
		return err
	}
	return fmt.Errorf("%w: %s %s", err, pgErr.Detail, pgErr.Hint)
}
