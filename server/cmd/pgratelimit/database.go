package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/config"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
)

// connectTimeout is for URLs that have no connect_timeout.
const connectTimeout = 10 * time.Second

// A database is the one that a command is about, or one of its shards.
type database struct {
	*pgx.Conn
	shard, of int // of is 0 where there are no shards
}

func (db database) String() string { return fmt.Sprintf("shard %d of %d", db.shard, db.of) }

// failed names the shard that has an error.
func (db database) failed(err error) error {
	if err == nil || db.of == 0 {
		return err
	}
	return fmt.Errorf("%s: %w", db, err)
}

// databases are those that the command line names, or else the environment.
func (p *program) databases() (config.Databases, error) {
	url, shards := p.databaseURL, p.shardURLs
	if url == "" && shards == "" {
		url, shards = os.Getenv("DATABASE_URL"), os.Getenv("SHARD_URLS")
	}
	databases, err := config.NewDatabases(url, shards)
	if err != nil {
		return databases, usageError{fmt.Errorf("%w; --database-url would do, too", err)}
	}
	return databases, nil
}

// open connects to all databases, or to the shard of a key. Warnings of the server are printed.
func (p *program) open(ctx context.Context, warnings io.Writer, key *string) (dbs []database, err error) {
	defer func() {
		if err != nil {
			closeAll(ctx, dbs)
			dbs = nil
		}
	}()
	databases, err := p.databases()
	if err != nil {
		return nil, err
	}
	for n, url := range databases.URLs {
		db := database{}
		if databases.AreShards {
			db.shard, db.of = n, len(databases.URLs)
			if key != nil && client.ShardOf(*key, db.of) != n {
				continue
			}
		}
		if db.Conn, err = connect(ctx, url, warnings); err != nil {
			return dbs, db.failed(err)
		}
		dbs = append(dbs, db)
	}
	return dbs, nil
}

func closeAll(ctx context.Context, dbs []database) {
	for _, db := range dbs {
		db.Close(context.WithoutCancel(ctx))
	}
}

// connect is open for databases that must be the shards that they are listed as, or none.
func (p *program) connect(ctx context.Context, warnings io.Writer, key *string) ([]database, error) {
	dbs, err := p.open(ctx, warnings, key)
	for _, db := range dbs {
		if err == nil && db.of > 0 {
			err = client.CheckShard(db.shard, db.of)(ctx, db.Conn)
		} else if err == nil {
			err = inspect.CheckAlone(ctx, db.Conn)
		}
	}
	if err != nil {
		closeAll(ctx, dbs)
		return nil, err
	}
	return dbs, nil
}

// An opener is open, or connect.
type opener func(ctx context.Context, warnings io.Writer, key *string) ([]database, error)

// onEach works on all databases, or on the shard of a key, in their order. After an error it goes no further.
func (p *program) onEach(c *cobra.Command, open opener, key *string, work func(database) error) error {
	dbs, err := open(c.Context(), c.ErrOrStderr(), key)
	if err != nil {
		return err
	}
	defer closeAll(c.Context(), dbs)
	for _, db := range dbs {
		if err := work(db); err != nil {
			return db.failed(err)
		}
	}
	return nil
}

// onShardOf makes a command of work on the database that has the key, its second argument.
func (p *program) onShardOf(work func(c *cobra.Command, conn *pgx.Conn, args []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		return p.onEach(c, p.connect, &args[1], func(db database) error { return work(c, db.Conn, args) })
	}
}

// askAll asks all databases for rows.
func askAll[R any](p *program, c *cobra.Command, ask func(database) ([]R, error)) (all []R, err error) {
	all = []R{}
	err = p.onEach(c, p.connect, nil, func(db database) error {
		rows, err := ask(db)
		all = append(all, rows...)
		return described(err)
	})
	return all, err
}

func connect(ctx context.Context, url string, warnings io.Writer) (*pgx.Conn, error) {
	config, err := pgx.ParseConfig(url)
	if err != nil {
		return nil, usageError{fmt.Errorf("--database-url, DATABASE_URL or SHARD_URLS: %w", err)}
	}
	if config.ConnectTimeout == 0 {
		config.ConnectTimeout = connectTimeout
	}
	config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
		if n.SeverityUnlocalized == "WARNING" {
			fmt.Fprintln(warnings, strings.TrimSpace(fmt.Sprintf("%s: %s: %s %s", n.Severity, n.Message, n.Detail, n.Hint)))
		}
	}
	return pgx.ConnectConfig(ctx, config)
}
