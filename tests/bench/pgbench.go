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
type bare struct{ stage }

const bareDatabase = "bare"

const (
	manyKeysSQL = `'user:' || :k`
	drawKey     = `\set k random(1, 100000)` + "\n"
	oneKey      = `\set k 50000` + "\n"
	drawRequest = `\set r random(1, 9000000000000000000)` + "\n"
)

var bareScripts = map[string]string{
	"bare/update":    drawKey + takeSQL(manyKeysSQL) + ` returning level;`, // the least that a limiter can do
	"bare/acquire":   drawKey + acquireSQL("full", manyKeysSQL),
	"bare/keyed":     drawKey + drawRequest + acquireSQL("full", manyKeysSQL, "1", `'request:' || :r`),
	"bare/keyed-hot": oneKey + drawRequest + acquireSQL("full", manyKeysSQL, "1", `'request:' || :r`),
	"bare/held":      drawKey + drawRequest + cycleSQL(manyKeysSQL),
	"bare/held-hot":  oneKey + drawRequest + cycleSQL(manyKeysSQL),
	"bare/settled": drawKey + drawRequest + acquireSQL("full", manyKeysSQL, "1", `'request:' || :r`) + "\n" +
		`select * from ratelimit_settle('full', ` + manyKeysSQL + `, 'request:' || :r, 2);`,
	"bare/select":  drawKey + `select level, refilled_at from bare where policy_id = 1 and key = ` + manyKeysSQL + `;`,
	"bare/denied":  drawKey + acquireSQL("dry", manyKeysSQL),
	"bare/insert":  drawKey + `insert into free values (` + manyKeysSQL + `);`,
	"bare/guarded": drawKey + `insert into guarded values (` + manyKeysSQL + `);`,
}

// takeSQL takes from one row if that has enough.
func takeSQL(key string) string {
	return `update bare set level = level - 1000000, refilled_at = now() where policy_id = 1 and key = ` + key + ` and level >= 1000000`
}

func acquireSQL(policy string, arguments ...string) string {
	return fmt.Sprintf(`select * from ratelimit_acquire('%s', %s);`, policy, strings.Join(arguments, ", "))
}

func (*bare) cells() []string {
	return []string{
		"bare/update", "bare/acquire", "bare/keyed", "bare/held", "bare/keyed-hot", "bare/held-hot", "bare/settled", "bare/insert", "bare/guarded",
		"bare/select", "bare/denied",
	}
}

func (b *bare) open(ctx context.Context, _ []string) error {
	_, err := b.database(ctx, bareDatabase, slices.Concat(bareTables(manyKeys), defineSlots(), guardedTable(), []string{fill{policy: "full", count: manyKeys}.inUse(), "create table free (like guarded)"})...)
	return err
}

// bareTables fills the buckets of a policy that never runs dry and of one that has, and a table to compare with.
func bareTables(count int) []string {
	full := []string{
		definePolicy("full", true),
		fill{policy: "full", count: count, tokens: capacity / 2}.sql(),
		"select ratelimit_acquire('full', 'hot')",
	}
	return slices.Concat(full, defineDry(count), []string{
		"create table bare (like ratelimit.buckets including all) with (fillfactor = 70)",
		"alter table bare drop column room",
		"insert into bare select 1, level, refilled_at, due_at, key from ratelimit.buckets as b" +
			" where b.policy_id = (select p.id from ratelimit.policies as p where p.name = 'full')",
		"vacuum analyze",
	})
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
	s, err := b.pg.pgbench(ctx, bareDatabase, bareScripts[cell], b.window)
	if err != nil || cell != "bare/keyed" {
		return s, err
	}
	return s, b.pg.space(ctx, bareDatabase, "ratelimit.idempotency_keys", "150 + 2.5 * octet_length(k.key || k.idempotency_key)", s)
}

func (b *bare) cost() time.Duration { return pgbenchCost(b.window) }

func pgbenchCost(window time.Duration) time.Duration { return time.Second + 2*window }

// A tally is how many transactions pgbench has made, in how much time.
type tally struct{ transactions, seconds float64 }

var (
	progressLine = regexp.MustCompile(`^progress: ([0-9.]+) s, ([0-9.]+) tps`)
	doneLine     = regexp.MustCompile(`(?s)transactions actually processed: ([0-9]+).*\ntps = ([0-9.]+)`)
	errPgbench   = errors.New("pgbench failed")
)

// pgbench runs a script by 16 clients for a few seconds. The first does not count: connections are made and
// statements prepared.
func (pg *postgres) pgbench(ctx context.Context, database, script string, window time.Duration) (sample, error) {
	file, err := os.CreateTemp("", "ratelimit-*.sql")
	if err != nil {
		return nil, err
	}
	defer os.Remove(file.Name())
	_, err = file.WriteString(script)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	program, err := pg.program(ctx, "pgbench")
	if err != nil {
		return nil, err
	}
	counted := max(1, (2 * window).Round(time.Second).Seconds())
	cmd := exec.CommandContext(ctx, program, "--no-vacuum", "--protocol=prepared", "--client", "16", "--jobs", "2",
		"--file", file.Name(), "--time", fmt.Sprint(1+counted), "--progress", "1", pg.URL(database))
	cmd.Env = append(os.Environ(), "PGOPTIONS=-c synchronous_commit=off")
	var summary, complaints strings.Builder
	cmd.Stdout = &summary
	messages, err := cmd.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	var first tally
	for lines := bufio.NewScanner(messages); lines.Scan(); {
		match := progressLine.FindStringSubmatch(lines.Text())
		switch {
		case match == nil:
			fmt.Fprintln(&complaints, lines.Text())
		case first.seconds == 0:
			seconds := number(match[1])
			first = tally{number(match[2]) * seconds, seconds}
		}
	}
	err = cmd.Wait()
	match := doneLine.FindStringSubmatch(summary.String())
	if err != nil || match == nil || strings.Contains(complaints.String(), "ERROR") {
		return nil, fmt.Errorf("%w\n%s", cmp.Or(err, errPgbench), complaints.String())
	}
	all := tally{number(match[1]), number(match[1]) / number(match[2])}
	return sample{rate: (all.transactions - first.transactions) / (all.seconds - first.seconds)}, nil
}

func number(text string) float64 {
	n, _ := strconv.ParseFloat(text, 64)
	return n
}

// space notes what a row of a table takes with its indexes, and that to the formula of docs/performance.md.
func (pg *postgres) space(ctx context.Context, database, table, formula string, s sample) error {
	bytes, err := queryRow[float64](ctx, pg, database, fmt.Sprintf(
		"select pg_total_relation_size('%s')::float8 / nullif(count(*), 0) from %[1]s", table))
	if err != nil {
		return err
	}
	foretold, err := queryRow[float64](ctx, pg, database, fmt.Sprintf(
		"select avg(%s)::float8 from (select * from %s limit 10000) as k", formula, table))
	s["bytes"], s["to_formula"] = bytes, bytes/foretold
	return err
}

// buckets compares few buckets with many, each number in a database of its own.
type buckets struct{ stage }

var bucketCounts = map[string]int{"buckets/10k": 10_000, "buckets/1m": 1_000_000, "buckets/10m": 10_000_000}

func (*buckets) cells() []string { return []string{"buckets/10k", "buckets/1m", "buckets/10m"} }

func databaseOf(cell string) string { return fmt.Sprintf("buckets_%d", bucketCounts[cell]) }

func (b *buckets) open(ctx context.Context, cells []string) error {
	for _, cell := range cells {
		_, err := b.database(ctx, databaseOf(cell),
			definePolicy("full", true),
			"set work_mem = '256MB'",
			fill{policy: "full", count: bucketCounts[cell], tokens: capacity / 2}.sql(),
			"vacuum analyze ratelimit.buckets")
		if err != nil {
			return err
		}
	}
	return nil
}

func (b *buckets) run(ctx context.Context, cell string) (sample, error) {
	script := fmt.Sprintf(`\set k random(1, %d)`, bucketCounts[cell]) + "\n" + acquireSQL("full", manyKeysSQL)
	s, err := b.pg.pgbench(ctx, databaseOf(cell), script, b.window)
	if err != nil {
		return nil, err
	}
	return s, b.pg.space(ctx, databaseOf(cell), "ratelimit.buckets", "183 + 3 * octet_length(k.key)", s)
}

func (b *buckets) cost() time.Duration { return pgbenchCost(b.window) }
