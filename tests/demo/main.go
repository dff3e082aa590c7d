// Command demo starts a PostgreSQL, installs pgratelimit and shows it at work:
//
//	go run ./tests/demo        # from the repository's root
//	go run ./tests/demo stop   # removes the server, which otherwise stays up
//	go run ./tests/demo serve  # shows build/pgratelimit serve on a database of its own, until Ctrl-C
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Where the demo notes which server it left running.
const keptIn = "build/demo.json"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	if len(os.Args) > 1 && os.Args[1] == "serve" {
		return serve(ctx)
	}
	if _, err := os.Stat(keptIn); err == nil {
		fmt.Println("Removing the server of the earlier demo, with all its databases.")
	}
	if err := pgtest.Remove(ctx, keptIn); err != nil || len(os.Args) > 1 {
		return err
	}

	fmt.Println("Looking for a PostgreSQL: RATELIMIT_DATABASE_URL, Docker, or one installed here ...")
	server, err := pgtest.Start(ctx, "fsync=on") // it stays, so it shall be a real one
	if err != nil {
		return err
	}
	if err = show(ctx, server); err == nil {
		err = server.Keep(keptIn)
	}
	if err != nil {
		return errors.Join(err, server.Close())
	}
	return nil
}

// script has a statement a line. "wait for" a column of the answer before, or for a time, sleeps.
const script = `
-- A policy: a bucket holds 5 tokens and gets 1 back every second.
select ratelimit_define_policy('demo', capacity => 5, refill => 1, every => '1 second')

-- A key's first acquire finds its bucket full.
select * from ratelimit_acquire('demo', 'user:42', cost => 4)

-- The next one does not fit. That is an answer, not an error, and nothing was written.
select * from ratelimit_acquire('demo', 'user:42', cost => 4)

-- retry_after is exact. After just that long ...
wait for retry_after
select * from ratelimit_acquire('demo', 'user:42', cost => 4)

-- Buckets refill by themselves: two seconds, two tokens.
wait for 00:00:02
select * from ratelimit_peek('demo', 'user:42')

-- With an idempotency key a retry gets the first answer again and takes nothing.
select * from ratelimit_acquire('demo', 'user:7', cost => 2, idempotency_key => 'order-1001')
select * from ratelimit_acquire('demo', 'user:7', cost => 2, idempotency_key => 'order-1001')

-- Tokens that were not needed can be given back.
select * from ratelimit_refund('demo', 'user:7', 1)

-- And a transaction that rolls back takes nothing.
begin
select * from ratelimit_acquire('demo', 'user:9', cost => 5)
rollback
select * from ratelimit_peek('demo', 'user:9', cost => 5)

-- One request, two limits: all of it is taken, or nothing. binding is the limit that decides.
select ratelimit_define_policy('demo-month', capacity => 1000, refill => 0, every => '1 day')
select allowed, remaining, retry_after, binding from ratelimit_acquire_all(array['demo', 'demo-month'], array['user:8', 'org:1'], array[2, 300])

-- What it really cost is known afterwards. The estimate was 300; settling replaces it, once.
select allowed, remaining from ratelimit_acquire('demo-month', 'org:2', 300, 'job-7')
select allowed, remaining, replayed from ratelimit_settle('demo-month', 'org:2', 'job-7', 420)
select allowed, remaining, replayed from ratelimit_settle('demo-month', 'org:2', 'job-7', 420)

-- Waiting in line: the tokens are taken now, and wait says when they are there.
select allowed, wait, remaining from ratelimit_reserve('demo', 'user:10', max_wait => '5 seconds', cost => 5)
select allowed, wait, remaining from ratelimit_reserve('demo', 'user:10', max_wait => '5 seconds', cost => 2)

-- Where nobody looks at an answer, such as in a trigger, a denial can be an error.
select * from ratelimit_enforce('demo', 'user:10')
`

func show(ctx context.Context, server *pgtest.Server) error {
	url, err := database(ctx, server)
	if err != nil {
		return err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	defer conn.Close(context.Background())
	fmt.Printf("Found: PostgreSQL %s (%s).\n", server.Version, server.Rung)

	start := time.Now()
	if err := migrations.Up(ctx, conn); err != nil {
		return err
	}
	fmt.Printf("Installed pgratelimit in %v.\n", time.Since(start).Round(time.Millisecond))
	if err := scheduleCleanup(ctx, conn); err != nil {
		return err
	}

	d := demo{ctx: ctx, conn: conn}
	d.exec("select ratelimit_drop_policy(policy) from ratelimit_policies() where policy like 'demo%'") // of the last run
	d.play(script)
	if d.err != nil {
		return d.err
	}

	fmt.Printf("\nGo on from here, with psql or any other client:\n  psql %q\n", url)
	if server.Rung == "url" {
		fmt.Printf("\nand drop the database when you are done:\n  psql %q -c 'drop database %s'\n", server.URL(""), ownDatabase)
	} else {
		fmt.Print("\nand when you are done (make demo again does it, too, and starts over):\n  make demo-stop\n")
	}
	fmt.Print("\nIn a database of yours:\n  make install DATABASE_URL=postgres://...\n")
	return nil
}

// What the demo creates on a server that is not its own.
const ownDatabase = "ratelimit_demo"

// database returns the URL of the database to use: on a server of ours the one that pg_cron is in.
func database(ctx context.Context, server *pgtest.Server) (string, error) {
	if server.Rung != "url" {
		return server.URL("postgres"), nil
	}
	conn, err := pgx.Connect(ctx, server.URL(""))
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, "create database "+ownDatabase)
	if there, ok := errors.AsType[*pgconn.PgError](err); ok && there.Code == "42P04" { // from an earlier run
		err = nil
	}
	return server.URL(ownDatabase), err
}

func scheduleCleanup(ctx context.Context, conn *pgx.Conn) error {
	script, err := pgtest.CronScript("schedule.sql")
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, script)
	var missing *pgconn.PgError
	switch {
	case errors.As(err, &missing) && missing.Code == "55000":
		fmt.Printf("Clean-up is not scheduled: %s. %s\n", missing.Message, missing.Hint)
		return nil
	case err == nil:
		fmt.Println("Scheduled clean-up every minute with pg_cron.")
	}
	return err
}

// A demo runs SQL and shows it; after an error it does nothing more.
type demo struct {
	ctx  context.Context
	conn *pgx.Conn
	err  error
}

// play runs the lines of a script, and shows them. An error of ratelimit_enforce is a part of it.
func (d *demo) play(script string) {
	var last map[string]string
	for line := range strings.Lines(script) {
		line = strings.TrimSpace(line)
		interval, waits := strings.CutPrefix(line, "wait for ")
		switch {
		case d.err != nil:
			return
		case waits:
			interval = cmp.Or(last[interval], interval)
			fmt.Printf("   ... %s later\n", interval)
			d.exec("select pg_sleep_for('" + interval + "')")
		case line == "" || strings.HasPrefix(line, "--"):
			fmt.Println(line)
		default:
			last = d.sql(line)
			if refusal, ok := errors.AsType[*pgconn.PgError](d.err); ok && refusal.Code == "RL429" {
				d.err = nil
				fmt.Printf("ERROR:  %s\nDETAIL:  %s\nHINT:  %s\n", refusal.Message, refusal.Detail, refusal.Hint)
			}
		}
	}
}

// sql runs a statement, shows it with its answer, which has one row, and returns that.
func (d *demo) sql(sql string) map[string]string {
	if d.err == nil {
		fmt.Printf("=> %s;\n", sql)
	}
	result := d.exec(sql)
	if result == nil || len(result.Rows) == 0 {
		return nil
	}
	first, table := map[string]string{}, tabwriter.NewWriter(os.Stdout, 0, 0, 1, ' ', tabwriter.Debug)
	var names, values []string
	for i, field := range result.FieldDescriptions {
		names, values = append(names, " "+field.Name), append(values, " "+string(result.Rows[0][i]))
		first[field.Name] = string(result.Rows[0][i])
	}
	if strings.TrimSpace(strings.Join(values, "")) == "" { // a function that returns void has nothing to show
		return nil
	}
	fmt.Fprintf(table, "%s\n%s\n", strings.Join(names, "\t"), strings.Join(values, "\t"))
	d.err = table.Flush()
	return first
}

func (d *demo) exec(sql string) *pgconn.Result {
	if d.err != nil {
		return nil
	}
	var results []*pgconn.Result
	if results, d.err = d.conn.PgConn().Exec(d.ctx, sql).ReadAll(); d.err != nil {
		return nil
	}
	return results[0]
}
