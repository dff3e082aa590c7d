package server

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
)

// connections are those of the pool, unless DATABASE_URL has pool_max_conns.
const connections = 10

// connectTimeout is that of DATABASE_URL, unless it has connect_timeout: an attempt that hears nothing keeps its place in the
// pool for as long.
const connectTimeout = 5 * time.Second

// openDatabase returns a pool that can acquire. The default policy is there if the configuration has one.
func openDatabase(ctx context.Context, c config.Config) (*pgxpool.Pool, error) {
	db, err := openPool(ctx, c)
	if err != nil {
		return nil, err
	}
	err = check(ctx, db)
	if err == nil && c.DefaultPolicy.Name != "" {
		err = definePolicy(ctx, db, c.DefaultPolicy)
	}
	if err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

func openPool(ctx context.Context, c config.Config) (*pgxpool.Pool, error) {
	p, err := pgxpool.ParseConfig(c.DatabaseURL)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL: %w", err)
	}
	if !strings.Contains(c.DatabaseURL, "pool_max_conns") {
		p.MaxConns = connections
	}
	p.MaxConns = max(p.MaxConns, int32(c.DatabaseCalls)+1)
	if p.ConnConfig.ConnectTimeout == 0 {
		p.ConnConfig.ConnectTimeout = connectTimeout
	}
	set := p.ConnConfig.RuntimeParams
	if set["application_name"] == "" {
		set["application_name"] = "pgratelimit"
	}
	if c.LockTimeout > 0 && set["lock_timeout"] == "" {
		set["lock_timeout"] = strconv.FormatInt(c.LockTimeout.Milliseconds(), 10)
	}
	return pgxpool.NewWithConfig(ctx, p)
}

// check returns why the database cannot acquire.
func check(ctx context.Context, db *pgxpool.Pool) error {
	var isInstalled, may, isReadOnly bool
	err := db.QueryRow(ctx, `
		select f.oid is not null,
		       coalesce(pg_catalog.has_function_privilege(f.oid, 'execute'), false),
		       pg_catalog.current_setting('transaction_read_only') = 'on'
		  from (select pg_catalog.to_regprocedure('ratelimit_acquire_packed(text[], text[], bigint[], integer[], text[])')::oid) as f (oid)`,
	).Scan(&isInstalled, &may, &isReadOnly)
	switch {
	case err != nil:
		return fmt.Errorf("the database does not answer: %w", err)
	case !isInstalled:
		return errors.New("pgratelimit is not installed in the database, or its schema is not on search_path, or its version is older than this program: run pgratelimit install")
	case !may:
		return errors.New("the role may not acquire: docs/operating.md has the grants for a Combiner")
	case isReadOnly:
		return errors.New("the database is read-only")
	}
	return nil
}

// definePolicy defines a policy that is not there. Servers that start together take turns.
func definePolicy(ctx context.Context, db *pgxpool.Pool, policy client.Policy) error {
	err := pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "select pg_catalog.pg_advisory_xact_lock(pg_catalog.hashtext('pgratelimit: default policy'))"); err != nil {
			return err
		}
		limiter := client.New(db).WithTx(tx)
		_, err := client.New(db).Peek(ctx, policy.Name, "any", client.Cost(0))
		if errors.Is(err, client.ErrUnknownPolicy) {
			err = limiter.DefinePolicy(ctx, policy)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("DEFAULT_CAPACITY: the policy %s: %w", policy.Name, err)
	}
	return nil
}
