package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

type postgres struct {
	*pgtest.Server
	bin  string // where pgbench is
	data string // directory
	pid  int    // of the postmaster
}

// settings are those of a production server of this size. Checkpoints are rare enough that a round
// rarely meets one, as it rarely would at the default of one in five minutes.
func settings() []string {
	return []string{
		"fsync=on",
		"full_page_writes=on",
		"shared_buffers=" + strconv.Itoa(min(memory()/4, 4096)) + "MB",
		"max_wal_size=16GB",
		"checkpoint_timeout=15min",
		"max_connections=300",
		"shared_preload_libraries=",
	}
}

// startPostgres takes the machine's own PostgreSQL unless RATELIMIT_TEST_REQUIRE says otherwise: both
// opponents are to be reached the same way, and a container has a proxy in between.
func startPostgres(ctx context.Context, more ...string) *postgres {
	if os.Getenv("RATELIMIT_TEST_REQUIRE") == "" {
		os.Setenv("RATELIMIT_TEST_REQUIRE", "local")
	}
	pg := &postgres{Server: must(pgtest.Start(ctx, append(settings(), more...)...))}
	if err := pg.locate(ctx); err != nil {
		panic(failure{errors.Join(fmt.Errorf("the server is not a process of this machine: %w", err), pg.Close())})
	}
	return pg
}

// locate finds the server's process, and from it the programs of its version.
func (pg *postgres) locate(ctx context.Context) (err error) {
	defer caught(&err)
	pg.data = queryRow[string](ctx, pg, "", "show data_directory")
	pg.pid = queryRow[int](ctx, pg, "", "select split_part(pg_read_file('postmaster.pid'), e'\\n', 1)::integer")
	pg.bin = filepath.Dir(must(os.Readlink(fmt.Sprintf("/proc/%d/exe", pg.pid))))
	return nil
}

func (pg *postgres) socket(database string) string {
	return must(url.Parse(pg.URL(database))).Query().Get("host")
}

// program returns the path of a program of PostgreSQL: that of the server's version, or another, where a package has few of them.
func (pg *postgres) program(ctx context.Context, name string) (string, error) {
	own := filepath.Join(pg.bin, name)
	if _, err := os.Stat(own); err == nil {
		return own, nil
	}
	others, _ := filepath.Glob("/usr/lib/postgresql/*/bin/" + name)
	if len(others) > 0 {
		return slices.Max(others), nil
	}
	return pgtest.Program(ctx, name)
}

func (pg *postgres) database(ctx context.Context, name string, statements ...string) {
	check(pg.exec(ctx, "", "create database "+name+" template template0"))
	conn := must(pgx.Connect(ctx, pg.URL(name)))
	defer conn.Close(ctx)
	check(migrations.Up(ctx, conn))
	check(pg.exec(ctx, name, statements...))
}

// exec runs statements one by one, each a transaction of its own.
func (pg *postgres) exec(ctx context.Context, database string, statements ...string) error {
	conn, err := pgx.Connect(ctx, pg.URL(database))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, sql := range statements {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%w\n%s", err, sql)
		}
	}
	return nil
}

func queryRow[T any](ctx context.Context, pg *postgres, database, sql string, args ...any) (value T) {
	conn := must(pgx.Connect(ctx, pg.URL(database)))
	defer conn.Close(ctx)
	if err := conn.QueryRow(ctx, sql, args...).Scan(&value); err != nil {
		panic(failure{fmt.Errorf("%w\n%s", err, sql)})
	}
	return value
}

// How many connections a pool of SQL callers has. Of 8 to 128 these did best on two cores: more only
// wait for each other, unless it is for the disk.
const (
	connections        = 16
	connectionsFlushed = 32
)

func openPool(ctx context.Context, url string, flush bool, connections int32, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	config := must(pgxpool.ParseConfig(url))
	config.MaxConns = connections
	config.ConnConfig.RuntimeParams["synchronous_commit"] = map[bool]string{false: "off", true: "on"}[flush]
	for _, change := range change {
		change(config)
	}
	return must(pgxpool.NewWithConfig(ctx, config))
}

// fill writes rows as acquires would, in a fraction of their time. Up to a million come in a random
// order, so that indexes are as loosely packed as they get in use; more would take minutes.
type fill struct {
	policy    string
	ephemeral bool
	prefix    string // of keys; defaults to userPrefix
	count     int
	tokens    int
	ago       string // when it was written; defaults to now
}

func (f fill) sql() string {
	table, order := "buckets", ""
	if f.ephemeral {
		table = "ephemeral_buckets"
	}
	if f.count <= 1_000_000 {
		order = "order by hashint4(i)"
	}
	return fmt.Sprintf(`insert into ratelimit.%s (policy_id, level, refilled_at, due_at, key)
		select p.id, %d::bigint * 1000000, ratelimit.clock() - interval '%[3]s',
		       -- When clean-up would look: all different, as they are when written one by one.
		       ratelimit.clock() - interval '%[3]s' + i * interval '1 ms' + (p.capacity - %[2]d) * p.every / greatest(p.refill, 1),
		       '%[7]s' || i
		  from generate_series(1, %[4]d) as i
		  join ratelimit.policies as p on p.name = '%[5]s'
		 %[6]s`, table, f.tokens, cmp.Or(f.ago, "0"), f.count, f.policy, order, cmp.Or(f.prefix, userPrefix))
}

// inUse asks for every bucket once: the first update of a row makes it smaller. A batch of every hundredth key is a transaction,
// as it would be in use, where what a page has no room for goes to another page.
func (f fill) inUse() string {
	return fmt.Sprintf(`do $$ begin
		for i in 1..100 loop
			perform ratelimit_acquire_many(array_agg(text '%s'), array_agg('%s' || n)) from generate_series(i, %d, 100) as n having count(*) > 0;
			commit;
		end loop;
	end $$`, f.policy, cmp.Or(f.prefix, userPrefix), f.count)
}

// definePolicy defines one under which no bucket of the benchmark runs dry.
func definePolicy(name string, durable bool) string {
	return fmt.Sprintf("select ratelimit_define_policy('%s', %d, %d, '1 hour', durable => %t)", name, capacity, refillPerHour, durable)
}

// definePolicies defines the policy durable, and gives every bucket a row.
func definePolicies() []string {
	f := fill{policy: "durable", count: manyKeys, tokens: capacity / 2}
	return []string{definePolicy("durable", true), f.sql(), f.inUse(), fmt.Sprintf("select ratelimit_acquire('durable', '%s')", hotKey)}
}
