// Package migrations installs pgratelimit into a PostgreSQL database.
//
// It carries the files that the tern command line applies, so that
//
//	cd migrations && go tool tern migrate
//
// and [Up] give the same schema.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/tern/v2/migrate"
)

// VersionTable records the installed schema version. It is not tern's default name, which the
// host application may use for migrations of its own.
const VersionTable = "public.ratelimit_schema_version"

//go:embed *.sql snapshots
var files embed.FS

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
// and its role must be allowed to create schemas. Settings made with SET are reset when something
// was installed. A newer schema than this release knows is left alone and reported as a
// [*NewerSchemaError].
func Up(ctx context.Context, conn *pgx.Conn) error {
	migrator, err := newMigrator(ctx, conn)
	if err != nil {
		return err
	}
	known := int32(len(migrator.Migrations))
	if err := migrator.Migrate(ctx); err != nil {
		var bad migrate.BadVersionError
		if errors.As(err, &bad) {
			if installed, err := migrator.GetCurrentVersion(ctx); err == nil && installed > known {
				return &NewerSchemaError{Installed: installed, Known: known}
			}
		}
		return fmt.Errorf("pgratelimit: install: %w", describe(err))
	}
	return nil
}

// Down removes the package with all its policies and buckets, and then its version table.
// The same conditions as for [Up] hold.
func Down(ctx context.Context, conn *pgx.Conn) error {
	migrator, err := newMigrator(ctx, conn)
	if err != nil {
		return err
	}
	if err := migrator.MigrateTo(ctx, 0); err != nil {
		return fmt.Errorf("pgratelimit: uninstall: %w", describe(err))
	}
	if _, err := conn.Exec(ctx, "drop table "+VersionTable); err != nil {
		return fmt.Errorf("pgratelimit: uninstall: %w", err)
	}
	return nil
}

func newMigrator(ctx context.Context, conn *pgx.Conn) (*migrate.Migrator, error) {
	if conn.PgConn().TxStatus() != 'I' {
		return nil, errors.New("pgratelimit: the connection is inside a transaction: commit it first")
	}
	if err := checkVersionTable(ctx, conn); err != nil {
		return nil, err
	}
	migrator, err := migrate.NewMigrator(ctx, conn, VersionTable)
	if err != nil {
		return nil, fmt.Errorf("pgratelimit: prepare %s: %w", VersionTable, err)
	}
	if err := migrator.LoadMigrations(files); err != nil {
		return nil, fmt.Errorf("pgratelimit: load migrations: %w", err)
	}
	return migrator, nil
}

// checkVersionTable refuses a table that another role may have put there: its triggers would run with
// the rights of whoever installs.
func checkVersionTable(ctx context.Context, conn *pgx.Conn) error {
	var trusted bool
	err := conn.QueryRow(ctx, `
		select not exists (
		  select
		    from pg_catalog.pg_class as c
		    join pg_catalog.pg_roles as r on r.oid = c.relowner
		   where c.oid = pg_catalog.to_regclass('`+VersionTable+`')::oid
		     and (c.relkind <> 'r'
		          or r.rolname <> current_user
		             and not r.rolsuper
		             and c.relowner not in (select n.nspowner from pg_catalog.pg_namespace as n where n.nspname = 'ratelimit')))`).
		Scan(&trusted)
	if err != nil {
		return fmt.Errorf("pgratelimit: check %s: %w", VersionTable, err)
	}
	if !trusted {
		return errors.New("pgratelimit: " + VersionTable + " is not a table of this package: drop it, or install as its owner")
	}
	return nil
}

// describe adds what the server had to say beyond the message.
func describe(err error) error {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Detail == "" && pgErr.Hint == "" {
		return err
	}
	return fmt.Errorf("%w: %s %s", err, pgErr.Detail, pgErr.Hint)
}
