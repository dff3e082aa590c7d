package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// bare compares our functions with the bare statements underneath by pgbench, with prepared statements
// and without waiting for the flush.
type bare struct{ lab *lab }

const bareDatabase = "bare"

// A bench is a script and how many clients run it.
type bench struct {
	clients int
	script  string
}

const (
	manyKeysSQL = `'user:' || :k`
	hotKeySQL   = `'hot'`
	drawKey     = `\set k random(1, 100000)` + "\n"
)

var benches = map[string]bench{
	"bare/update":  {16, drawKey + updateSQL(manyKeysSQL)},
	"bare/acquire": {16, drawKey + acquireSQL("full", manyKeysSQL)},
	"bare/keyed":   {16, drawKey + `\set r random(1, 9000000000000000000)` + "\n" + acquireSQL("full", manyKeysSQL, "1", `'request:' || :r`)},
	"bare/select":  {16, drawKey + selectSQL(manyKeysSQL)},
	"bare/denied":  {16, drawKey + acquireSQL("dry", manyKeysSQL)},
	"bare/settled": {16, drawKey + `\set r random(1, 9000000000000000000)` + "\n" + acquireSQL("full", manyKeysSQL, "1", `'request:' || :r`) + "\n" +
		`select * from ratelimit_settle('full', ` + manyKeysSQL + `, 'request:' || :r, 2);`},
	"bare/reserved":    {16, drawKey + `select * from ratelimit_reserve('full', ` + manyKeysSQL + `, '1 hour');`},
	"bare/enforced":    {16, drawKey + `select * from ratelimit_enforce('full', ` + manyKeysSQL + `);`},
	"bare/insert":      {16, drawKey + `insert into free values (` + manyKeysSQL + `);`},
	"bare/guarded":     {16, drawKey + `insert into guarded values (` + manyKeysSQL + `);`},
	"bare/hot-update":  {64, updateSQL(hotKeySQL)},
	"bare/hot-acquire": {64, acquireSQL("full", hotKeySQL)},
}

// updateSQL is the least that a limiter can do: take from one row if that has enough.
func updateSQL(key string) string { return takeSQL(key) + ` returning level;` }

func takeSQL(key string) string {
	return `update bare set level = level - 1000000, refilled_at = now() where policy_id = 1 and key = ` + key + ` and level >= 1000000`
}

func selectSQL(key string) string {
	return `select level, refilled_at from bare where policy_id = 1 and key = ` + key + `;`
}

func acquireSQL(policy string, arguments ...string) string {
	return fmt.Sprintf(`select * from ratelimit_acquire('%s', %s);`, policy, strings.Join(arguments, ", "))
}

func (*bare) cells() []string {
	return []string{"bare/update", "bare/acquire", "bare/reserved", "bare/enforced", "bare/keyed", "bare/settled", "bare/insert", "bare/guarded",
		"bare/select", "bare/denied", "bare/hot-update", "bare/hot-acquire", "bare/wal"}
}

func (b *bare) open(ctx context.Context, _ []string) error {
	pg, err := b.lab.postgres(ctx)
	if err != nil {
		return err
	}
	return pg.database(ctx, bareDatabase, slices.Concat(bareTables(manyKeys), guardedTable(), []string{fill{policy: "full", count: manyKeys}.inUse(), "create table free (like guarded)"})...)
}

// bareTables fills the buckets of a policy that never runs dry and of one that has, and a table to compare with.
func bareTables(count int) []string {
	return []string{
		definePolicy("full", true),
		fill{policy: "full", count: count, tokens: capacity / 2}.sql(),
		"select ratelimit_acquire('full', 'hot')",
		"select ratelimit_define_policy('dry', 1, 1, '1000 days')",
		fill{policy: "dry", count: count}.sql(),
		"create table bare (like ratelimit.buckets including all) with (fillfactor = 70)",
		"alter table bare drop column room",
		"insert into bare select 1, level, refilled_at, due_at, key from ratelimit.buckets as b" +
			" where b.policy_id = (select p.id from ratelimit.policies as p where p.name = 'full')",
		"vacuum analyze",
	}
}

// guardedTable is one whose rows each take a token.
func guardedTable() []string {
	return []string{
		"create table guarded (key text not null)",
		"create trigger limited after insert on guarded referencing new table as inserted" +
			" for each statement execute function ratelimit_guard('full', 'key')",
	}
}

func (b *bare) run(ctx context.Context, cell string) (sample, error) {
	if cell == "bare/wal" {
		return b.wal(ctx)
	}
	s, err := b.lab.pg.pgbench(ctx, bareDatabase, benches[cell], b.lab.window)
	if err != nil || cell != "bare/keyed" {
		return s, err
	}
	return s, b.lab.pg.space(ctx, bareDatabase, "ratelimit.idempotency_keys", "k.key || k.idempotency_key", s)
}

// wal counts the bytes of log that denials write, one after another in a quiet cluster.
func (b *bare) wal(ctx context.Context) (sample, error) {
	const clients, each = 4, 1000
	pg := b.lab.pg
	if err := pg.exec(ctx, bareDatabase, "checkpoint"); err != nil {
		return nil, err
	}
	denials := bench{clients, benches["bare/denied"].script}
	if _, err := pg.runPgbench(ctx, bareDatabase, denials, []string{"--transactions", "100"}, nil); err != nil {
		return nil, err
	}
	const position = "select (pg_current_wal_insert_lsn() - '0/0')::float8"
	before, err := queryRow[float64](ctx, pg, bareDatabase, position)
	if err != nil {
		return nil, err
	}
	if _, err := pg.runPgbench(ctx, bareDatabase, denials, []string{"--transactions", strconv.Itoa(each)}, nil); err != nil {
		return nil, err
	}
	after, err := queryRow[float64](ctx, pg, bareDatabase, position)
	return sample{"bytes": (after - before) / (clients * each)}, err
}

func (b *bare) cost() time.Duration { return pgbenchCost(b.lab.window) }

func (b *bare) close(ctx context.Context) error { return b.lab.dropDatabases(ctx, bareDatabase) }

func pgbenchCost(window time.Duration) time.Duration { return time.Second + 2*window }

// pgbench runs a script for a few seconds. The first does not count: connections are made and
// statements prepared.
func (pg *postgres) pgbench(ctx context.Context, database string, b bench, window time.Duration) (sample, error) {
	counted := max(1, (2 * window).Round(time.Second).Seconds())
	var (
		first tally
		cpu   time.Duration
	)
	limit := []string{"--time", fmt.Sprint(1 + counted), "--progress", "1"}
	all, err := pg.runPgbench(ctx, database, b, limit, func(t tally) {
		if first.seconds == 0 {
			first, cpu = t, cpuOf(pg.pid)
		}
	})
	if err != nil {
		return nil, err
	}
	decisions := all.transactions - first.transactions
	return sample{
		rate:      decisions / (all.seconds - first.seconds),
		cpuServer: float64((cpuOf(pg.pid) - cpu).Microseconds()) / decisions,
	}, nil
}

// A tally is how many transactions pgbench has made, in how much time.
type tally struct{ transactions, seconds float64 }

var (
	progressLine = regexp.MustCompile(`^progress: ([0-9.]+) s, ([0-9.]+) tps`)
	doneLine     = regexp.MustCompile(`(?s)transactions actually processed: ([0-9]+).*\ntps = ([0-9.]+)`)
	errPgbench   = errors.New("pgbench failed")
)

// runPgbench runs a script within a limit, and hands on what it tells on the way.
func (pg *postgres) runPgbench(ctx context.Context, database string, b bench, limit []string, progress func(tally)) (tally, error) {
	file, err := os.CreateTemp("", "ratelimit-*.sql")
	if err != nil {
		return tally{}, err
	}
	defer os.Remove(file.Name())
	if _, err := file.WriteString(b.script); err != nil {
		return tally{}, err
	}
	if err := file.Close(); err != nil {
		return tally{}, err
	}
	arguments := append([]string{"--no-vacuum", "--protocol=prepared", "--client", strconv.Itoa(b.clients), "--jobs", "2",
		"--file", file.Name()}, limit...)
	program, err := pg.program(ctx, "pgbench")
	if err != nil {
		return tally{}, err
	}
	cmd := exec.CommandContext(ctx, program, append(arguments, pg.URL(database))...)
	cmd.Env = append(os.Environ(), "PGOPTIONS=-c synchronous_commit=off")
	var summary, complaints strings.Builder
	cmd.Stdout = &summary
	messages, err := cmd.StderrPipe()
	if err != nil {
		return tally{}, err
	}
	if err := cmd.Start(); err != nil {
		return tally{}, err
	}
	for lines := bufio.NewScanner(messages); lines.Scan(); {
		if match := progressLine.FindStringSubmatch(lines.Text()); match != nil {
			seconds := number(match[1])
			progress(tally{number(match[2]) * seconds, seconds}) // right for the first, which is all we ask
		} else {
			fmt.Fprintln(&complaints, lines.Text())
		}
	}
	err = cmd.Wait()
	match := doneLine.FindStringSubmatch(summary.String())
	if err != nil || match == nil || strings.Contains(complaints.String(), "ERROR") {
		return tally{}, fmt.Errorf("%w\n%s", cmp.Or(err, errPgbench), complaints.String())
	}
	transactions := number(match[1])
	return tally{transactions, transactions / number(match[2])}, nil
}

func number(text string) float64 {
	n, _ := strconv.ParseFloat(text, 64)
	return n
}

// space notes what a row of a table takes with its indexes, and what the capacity formula says.
func (pg *postgres) space(ctx context.Context, database, table, text string, s sample) error {
	bytes, err := queryRow[float64](ctx, pg, database, fmt.Sprintf(
		"select pg_total_relation_size('%s')::float8 / nullif(count(*), 0) from %[1]s", table))
	if err != nil {
		return err
	}
	length, err := queryRow[float64](ctx, pg, database, fmt.Sprintf(
		"select avg(octet_length(%s))::float8 from (select * from %s limit 10000) as k", text, table))
	s["bytes"], s["text"] = bytes, length
	return err
}
