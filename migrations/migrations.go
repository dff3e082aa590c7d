// Package migrations installs pgratelimit into a PostgreSQL database.
//
// It carries the files that the tern command line applies. Every other way to install is made of them by package
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
	"text/template"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"

	"github.com/pgratelimit/pgratelimit/sql"
)

// VersionTable records the installed schema version, in the schema that the package has for itself.
const VersionTable = "ratelimit.schema_version"

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

//go:embed prepare.tmpl
var prepare string

var templates = template.Must(template.New("").Parse(prepare))

// work is what a template is about.
type work struct {
	Known      []*migrate.Migration // all of this release
	Migrations []*migrate.Migration // those that an install applies, where they are missing
}

func (w work) execute(name string) (string, error) {
	var text strings.Builder
	if err := templates.ExecuteTemplate(&text, name, w); err != nil {
		return "", fmt.Errorf("pgratelimit: %w", err)
	}
	return text.String(), nil
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
	known, err := load(nil)
	if err != nil {
		return err
	}
	migrator, err := newMigrator(ctx, conn, work{Known: known, Migrations: known})
	if err != nil {
		return err
	}
	if err := migrator.Migrate(ctx); err != nil {
		if _, ok := errors.AsType[migrate.BadVersionError](err); ok {
			if installed, err := migrator.GetCurrentVersion(ctx); err == nil && int(installed) > len(known) {
				return &NewerSchemaError{Installed: installed, Known: int32(len(known))}
			}
		}
		return fmt.Errorf("pgratelimit: install: %w", describe(err))
	}
	return nil
}

// Down removes the package with all its policies and buckets, as the owner of schema ratelimit and on
// a connection outside a transaction. Where it is not installed, nothing happens. The jobs of pg_cron/schedule.sql
// are removed too; a warning of the server says where they could not be.
func Down(ctx context.Context, conn *pgx.Conn) error {
	known, err := load(map[string]any{"uninstall": true})
	if err != nil {
		return err
	}
	if err := outsideTransaction(conn); err != nil {
		return err
	}
	var installed bool
	err = conn.QueryRow(ctx, "select pg_catalog.to_regnamespace('ratelimit') is not null").Scan(&installed)
	if err != nil || !installed {
		return err
	}
	w := work{Known: known}
	migrator, err := newMigrator(ctx, conn, w)
	if err != nil {
		return err
	}
	if err := migrator.MigrateTo(ctx, 0); err != nil {
		return fmt.Errorf("pgratelimit: uninstall: %w", describe(err))
	}
	remove, err := w.execute("remove")
	if err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, remove); err != nil {
		return fmt.Errorf("pgratelimit: uninstall: %w", describe(err))
	}
	return nil
}

// load reads the migrations, with data for their templates. The migrator needs no connection for that.
func load(data map[string]any) ([]*migrate.Migration, error) {
	migrator, err := migrate.NewMigrator(context.Background(), nil, VersionTable)
	if err == nil {
		migrator.Data = data
		err = migrator.LoadMigrations(files{})
	}
	if err != nil {
		return nil, fmt.Errorf("pgratelimit: load migrations: %w", err)
	}
	return migrator.Migrations, nil
}

func outsideTransaction(conn *pgx.Conn) error {
	if conn.PgConn().TxStatus() != 'I' {
		return errors.New("pgratelimit: the connection is inside a transaction: commit it first")
	}
	return nil
}

func newMigrator(ctx context.Context, conn *pgx.Conn, w work) (*migrate.Migrator, error) {
	if err := outsideTransaction(conn); err != nil {
		return nil, err
	}
	prepare, err := w.execute("prepare")
	if err != nil {
		return nil, err
	}
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, prepare)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("pgratelimit: prepare schema ratelimit: %w", describe(err))
	}
	migrator, err := migrate.NewMigrator(ctx, conn, VersionTable)
	if err != nil {
		return nil, fmt.Errorf("pgratelimit: prepare %s: %w", VersionTable, describe(err))
	}
	migrator.Migrations = w.Known
	return migrator, nil
}

// describe adds what the server had to say beyond the message.
func describe(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Detail == "" && pgErr.Hint == "" {
		return err
	}
	return fmt.Errorf("%w: %s %s", err, pgErr.Detail, pgErr.Hint)
}
