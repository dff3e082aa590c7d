package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	manyKeysSQL = `'user:' || :k`
	drawKey     = `\set k random(1, 100000)` + "\n"
	oneKey      = `\set k 50000` + "\n"
	drawRequest = `\set r random(1, 9000000000000000000)` + "\n"
)

// bareScripts compare our functions with the bare statements underneath, with prepared statements and without waiting for the flush.
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

var bareCells = []string{
	"bare/update", "bare/acquire", "bare/keyed", "bare/held", "bare/keyed-hot", "bare/held-hot", "bare/settled", "bare/insert", "bare/guarded",
	"bare/select", "bare/denied",
}

func openBare(ctx context.Context, s *stage, _ []string) measure {
	const database = "bare"
	setUp := slices.Concat(bareTables(manyKeys), defineSlots(), guardedTable(), []string{fill{policy: "full", count: manyKeys}.inUse(), "create table free (like guarded)"})
	pg := s.database(ctx, database, setUp...)
	return func(ctx context.Context, cell string) (sample, error) {
		figures := pg.pgbench(ctx, database, bareScripts[cell], s.window)
		if cell == "bare/keyed" {
			pg.space(ctx, database, "ratelimit.idempotency_keys", "150 + 2.5 * octet_length(k.key || k.idempotency_key)", figures)
		}
		return figures, nil
	}
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

var ratePrinted = regexp.MustCompile(`(?m)^tps = ([0-9.]+)`)

// pgbench runs a script by 16 clients for a second that does not count, and then for two windows.
func (pg *postgres) pgbench(ctx context.Context, database, script string, window time.Duration) (figures sample) {
	program := must(pg.program(ctx, "pgbench"))
	for _, seconds := range []float64{1, max(1, (2 * window).Round(time.Second).Seconds())} {
		cmd := exec.CommandContext(ctx, program, "--no-vacuum", "--protocol=prepared", "--client", "16", "--jobs", "2",
			"--file", "-", "--time", fmt.Sprint(seconds), pg.URL(database))
		cmd.Env = append(os.Environ(), "PGOPTIONS=-c synchronous_commit=off")
		cmd.Stdin = strings.NewReader(script)
		out := output(cmd)
		match := ratePrinted.FindStringSubmatch(out)
		if match == nil || strings.Contains(out, "ERROR") {
			panic(failure{fmt.Errorf("pgbench:\n%s", out)})
		}
		figures = sample{rate: number(match[1])}
	}
	return figures
}

func number(text string) float64 {
	n, _ := strconv.ParseFloat(text, 64)
	return n
}

// space notes what a row of a table takes with its indexes, and that to the formula of docs/performance.md.
func (pg *postgres) space(ctx context.Context, database, table, formula string, s sample) {
	bytes := queryRow[float64](ctx, pg, database, fmt.Sprintf("select pg_total_relation_size('%s')::float8 / nullif(count(*), 0) from %[1]s", table))
	foretold := queryRow[float64](ctx, pg, database, fmt.Sprintf("select avg(%s)::float8 from (select * from %s limit 10000) as k", formula, table))
	s["bytes"], s["to_formula"] = bytes, bytes/foretold
}

// bucketCells compare few buckets with many, each number in a database of its own.
var bucketCells = []string{"buckets/10k", "buckets/1m", "buckets/10m"}

func openBuckets(ctx context.Context, s *stage, cells []string) measure {
	counts := map[string]int{"buckets/10k": 10_000, "buckets/1m": 1_000_000, "buckets/10m": 10_000_000}
	database := func(cell string) string { return fmt.Sprintf("buckets_%d", counts[cell]) }
	for _, cell := range cells {
		s.database(ctx, database(cell),
			definePolicy("full", true),
			"set work_mem = '256MB'",
			fill{policy: "full", count: counts[cell], tokens: capacity / 2}.sql(),
			"vacuum analyze ratelimit.buckets")
	}
	return func(ctx context.Context, cell string) (sample, error) {
		script := fmt.Sprintf(`\set k random(1, %d)`, counts[cell]) + "\n" + acquireSQL("full", manyKeysSQL)
		figures := s.pg.pgbench(ctx, database(cell), script, s.window)
		s.pg.space(ctx, database(cell), "ratelimit.buckets", "183 + 3 * octet_length(k.key)", figures)
		return figures, nil
	}
}
