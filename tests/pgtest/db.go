package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations"
)

// A DB is a database of one test.
type DB struct {
	Pool *pgxpool.Pool
	URL  string
	Name string
}

// Exec runs one statement, or several without arguments, and fails the test when it cannot.
func (db *DB) Exec(t testing.TB, sql string, args ...any) {
	_, err := db.Pool.Exec(context.Background(), sql, args...)
	require.NoError(t, err, sql)
}

// Connect returns a connection of its own, closed when the test ends.
func (db *DB) Connect(t testing.TB, change ...func(*pgx.ConnConfig)) *pgx.Conn {
	config := noError(pgx.ParseConfig(db.URL))(t)
	for _, change := range change {
		change(config)
	}
	conn := noError(pgx.ConnectConfig(context.Background(), config))(t)
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// Await asks until the query answers true, and fails the test when it has not within the time given.
func (db *DB) Await(t testing.TB, within time.Duration, sql string, args ...any) {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	for {
		var done bool
		require.NoError(t, db.Pool.QueryRow(ctx, sql, args...).Scan(&done), "not so within %v\n%s %v", within, sql, args)
		if done {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// databases creates and drops the databases of one process. Their names begin with the application_name of a connection that
// stays open as long as the process lives, by which the next process on a shared server knows which databases were left behind.
type databases struct {
	server *Server
	owner  string

	mu       sync.Mutex // the connection is one, and a template is copied by one session at a time
	conn     *pgx.Conn
	template string
	count    int
}

const prefix = "ratelimit_test_"

func newDatabases(ctx context.Context, server *Server) (*databases, error) {
	d := &databases{server: server, owner: prefix + strings.ToLower(rand.Text()[:10])}
	config, err := pgx.ParseConfig(server.URL(""))
	if err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	config.RuntimeParams["application_name"] = d.owner
	if d.conn, err = pgx.ConnectConfig(ctx, config); err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	if err := errors.Join(d.sweep(ctx), d.install(ctx)); err != nil {
		return nil, errors.Join(err, d.close(ctx))
	}
	return d, nil
}

// sweep drops the databases of processes that were killed.
func (d *databases) sweep(ctx context.Context) error {
	return d.dropAll(ctx, `
		select d.datname
		  from pg_database as d
		 where d.datname like $1 || '%'
		   and pg_get_userbyid(d.datdba) = current_user
		   and not exists (select from pg_stat_activity as a where a.application_name = left(d.datname, length($1) + 10))`,
		prefix)
}

func (d *databases) install(ctx context.Context) error {
	name := d.owner + "_template"
	if err := d.exec(ctx, "create database %s template template0", name); err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, d.server.URL(name))
	if err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	d.template = name
	return errors.Join(migrations.Up(ctx, conn), conn.Close(ctx))
}

func (d *databases) create(ctx context.Context, installed bool, options ...string) (*DB, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	template := "template0"
	if installed {
		template = d.template
	}
	if d.server.Rung != rungURL { // a server with fsync would wait for two checkpoints
		options = append(options, "strategy file_copy")
	}
	d.count++
	name := fmt.Sprintf("%s_%d", d.owner, d.count)
	if err := d.exec(ctx, "create database %s template %s "+strings.Join(options, " "), name, template); err != nil {
		return nil, err
	}
	config, err := pgxpool.ParseConfig(d.server.URL(name))
	if err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	config.MaxConns = 32
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	return &DB{Pool: pool, URL: d.server.URL(name), Name: name}, nil
}

func (d *databases) drop(ctx context.Context, db *DB) (err error) {
	closed := make(chan struct{})
	go func() {
		db.Pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(time.Minute): // a test that failed should not hang too
		err = errors.New("pgtest: a connection was not released to its pool")
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(err, d.exec(ctx, "drop database if exists %s with (force)", db.Name))
}

func (d *databases) close(ctx context.Context) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return errors.Join(d.dropAll(ctx, "select datname from pg_database where datname like $1 || '%'", d.owner), d.conn.Close(ctx))
}

func (d *databases) dropAll(ctx context.Context, query string, args ...any) error {
	rows, err := d.conn.Query(ctx, query, args...)
	if err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("pgtest: %w", err)
	}
	for _, name := range names {
		err = errors.Join(err, d.exec(ctx, "drop database if exists %s with (force)", name))
	}
	return err
}

// exec fills in quoted names.
func (d *databases) exec(ctx context.Context, format string, names ...string) error {
	quoted := make([]any, len(names))
	for i, name := range names {
		quoted[i] = pgx.Identifier{name}.Sanitize()
	}
	sql := fmt.Sprintf(format, quoted...)
	if _, err := d.conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("pgtest: %s: %w", sql, err)
	}
	return nil
}
