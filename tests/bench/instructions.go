package main

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// instructions counts what the processor executes for one decision, by valgrind, in a server of one process.
// Time is the database's own and statistics are not counted, so that runs differ by 0.3 %, whatever else the machine does; where
// a page of an index is split, by 1 %.
// It has what begins and commits the statement, which "nothing" has alone, but neither the kernel nor a connection.
type instructions struct {
	pg       *postgres
	version  string // of the server
	valgrind string
}

// A writing is what a decision executes and writes: instructions, transaction ids, and bytes of WAL without full pages.
type writing struct{ instructions, ids, wal float64 }

const instructionsDatabase = "instructions"

const countedKeys = 1000

// A counted statement has the parameter $1, a key or an array of as many keys as it decides about.
type counted struct {
	name string
	keys int // 0 is one, and no array
	sql  string
}

// countedStatements are in the order of the record.
var countedStatements = slices.Concat([]counted{
	{"nothing", 0, "select"},
	{"select", 0, "select from bare where policy_id = 1 and key = $1"},
	{"update", 0, takeSQL("$1")},
	{"acquire", 0, "select from ratelimit_acquire('full', $1)"},
	{"denied", 0, "select from ratelimit_acquire('dry', $1)"},
	{"keyed", 0, "select from ratelimit_acquire('full', $1, 1, " + newKey + ")"},
	{"keyed-denied", 0, "select from ratelimit_acquire('dry', $1, 1, " + newKey + ")"},
	{"replayed", 0, "select from ratelimit_acquire('full', $1, 1, 'again')"},
	{"ephemeral", 0, "select from ratelimit_acquire('ephemeral', $1)"},
	{"stepped", 0, "select from ratelimit_acquire('stepped', $1)"},
	{"shadowed", 0, "select from ratelimit_acquire('shadow', $1)"},
	{"overrides", 0, "select from ratelimit_acquire('overrides', $1)"},
	{"overridden", 0, "select from ratelimit_acquire('overridden', $1)"},
	{"quota", 0, "select from ratelimit_acquire('quota', $1)"},
	{"quota-denied", 0, "select from ratelimit_acquire('quota', $1, 20000000)"},
	{"history", 0, "select from ratelimit_acquire('history', $1)"},
	{"zoned", 0, "select from ratelimit_acquire('zoned', $1)"},
	{"peek", 0, "select from ratelimit_peek('full', $1)"},
	{"refund", 0, "select from ratelimit_refund('full', $1, 1)"},
	{"pause", 0, "select from ratelimit_pause('paused', $1, '1 second')"},
	{"http-fields", 0, "select from ratelimit_http_fields('full', (true, 5, '0 s', '9 s', 10, false, false)::ratelimit.decision)"},
	{"reserved", 0, "select from ratelimit_reserve('full', $1, '1 hour')"},
	{"waiting", 0, "select from ratelimit_reserve('line', $1, '365 days')"},
	{"up-to", 0, "select from ratelimit_acquire_up_to('full', $1, 1)"},
	{"charged", 0, "select from ratelimit_charge('full', $1, 1)"},
	{"keyed-settled", 0, "select from (select " + newKey + " as key offset 0) as i," + // settled without keyed
		" ratelimit_acquire('full', $1, 1, i.key) as a, ratelimit_settle('full', $1, case when a.allowed then i.key end, 2)"},
	{"enforced", 0, "select from ratelimit_enforce('full', $1)"},
	{"held", 0, "select from ratelimit_hold('slots', $1, " + newKey + ")"},
	{"held-denied", 0, "select from ratelimit_hold('slots', $1, 'new', 20)"},
	{"held-of-1000", 0, "select from ratelimit_hold('slots', 'crowd', $1 || " + newKey + ")"},
	{"held-released", 0, "select from (select " + newKey + " as key offset 0) as i," + // released without held
		" ratelimit_hold('slots', $1, i.key) as h, ratelimit_release('slots', $1, case when h.allowed then i.key end)"},
	{"renewed", 0, "select ratelimit_renew('slots', $1, '1')"},
	{"guarded", 0, "insert into guarded values ($1)"},
	{"guarded-32", 32, "insert into guarded select unnest($1)"},
	{"joint", 0, "select from ratelimit_acquire_all(array['full', 'second', 'third'], array[$1, $1, $1])"},
	{"joint-settled", 0, "select from (select " + newKey + " as key offset 0) as i," +
		" ratelimit_acquire_all(array['full', 'second', 'third'], array[$1, $1, $1], null, i.key) as a," +
		" ratelimit_settle_all(array['full', 'second', 'third'], array[$1, $1, $1], case when a.allowed then i.key end, array[2, 2, 2])"},
	{"joint-keyed", 0, "select from ratelimit_acquire_all(array['full', 'second', 'third'], array[$1, $1, $1], null, " + newKey + ")"},
	{"joint-denied", 0, "select from ratelimit_acquire_all(array['full', 'dry', 'third'], array[$1, $1, $1])"},
	{"joint-keyed-denied", 0, "select from ratelimit_acquire_all(array['full', 'dry', 'third'], array[$1, $1, $1], null, " + newKey + ")"},
	{"joint-many-32", 32, "select from ratelimit_acquire_many(" + three + ", sizes => array_fill(3, array[32]))"},
	{"joint-32", 32, "select from ratelimit_acquire_packed(" + three + ", null, array_fill(3, array[32]))"},
	{"joint-keyed-32", 32, "select from ratelimit_acquire_packed(" + three + ", null, array_fill(3, array[32]), " + newKeys(32) + ")"},
}, batches("", "ratelimit_acquire_many", "null"), batches("packed-", "ratelimit_acquire_packed", "null, null"), []counted{
	{"packed-8", 8, "select from ratelimit_acquire_packed(array_fill(text 'full', array[8]), $1)"},
	{"packed-turn-32", 32, "select from ratelimit_acquire_packed(array_fill(text 'history', array[32]), $1)"}, // see before()
	// The last ones, since rows that come take the room that others have left on their pages.
	{"created", 0, "select from ratelimit_acquire('full', $1 || " + newKey + ")"},
	{"reset", 0, "select ratelimit_reset('full', 'no ' || $1)"}, // the others' rows stay
})

// three has what is asked of three policies for each key.
const three = "array(select (array['full', 'second', 'third'])[1 + i % 3] from generate_series(0, 95) as i)," +
	" array(select ($1::text[])[1 + i / 3] from generate_series(0, 95) as i)"

// newKey is an idempotency key that nobody has used, and the same in each run: where keys fall decides which pages are split.
const newKey = "md5(nextval('new_keys')::text)"

func newKeys(count int) string {
	return fmt.Sprintf("array(select %s from generate_series(1, %d))", newKey, count)
}

// batches are calls of a function that decides many requests. Between its keys and its idempotency keys are arguments that are left out.
func batches(prefix, function, omitted string) (list []counted) {
	for _, size := range []int{32, 128} {
		add := func(kind, policy, arguments string) {
			name := prefix + kind + "-" + strconv.Itoa(size)
			if kind == "" {
				name = cmp.Or(prefix, "batch-") + strconv.Itoa(size)
			}
			list = append(list, counted{name, size, fmt.Sprintf("select from %s(array_fill(text '%s', array[%d]), %s)", function, policy, size, arguments)})
		}
		add("", "full", "$1")
		add("denied", "dry", "$1")
		add("quota", "quota", "$1")
		add("history", "history", "$1")
		add("keyed", "full", "$1, "+omitted+", "+newKeys(size))
		add("hot", "full", fmt.Sprintf("array_fill(($1::text[])[1], array[%d])", size))
		add("hot-denied", "dry", fmt.Sprintf("array_fill(($1::text[])[1], array[%d])", size))
	}
	return list
}

// countedPolicies defines what the statements ask about beside bareTables. All rows are there before the first is asked for: later
// ones would take the room that this leaves.
func countedPolicies() (sql []string) {
	inUse := []string{fill{policy: "full", count: countedKeys}.inUse()}
	for _, name := range []string{"second", "third", "overrides", "overridden", "stepped", "paused", "ephemeral"} {
		f := fill{policy: name, ephemeral: name == "ephemeral", count: countedKeys, tokens: capacity / 2}
		sql = append(sql, definePolicy(name, !f.ephemeral), f.sql())
		inUse = append(inUse, f.inUse())
	}
	for _, name := range []string{"quota", "history", "zoned"} {
		f := fill{policy: name, count: countedKeys, tokens: -capacity / 2} // the level of a quota's bucket is below zero
		sql = append(sql, fmt.Sprintf("select ratelimit_define_policy('%s', %d, period => '1 month')", name, capacity), f.sql())
		inUse = append(inUse, f.inUse())
	}
	return slices.Concat(sql, guardedTable(), []string{
		"select ratelimit_define_policy('stepped', stepped => true)",
		"select ratelimit_define_policy('history', history => '1 year')",
		"select ratelimit_define_policy('shadow', 1, 1, '1000 days', shadow => true)",
		fill{policy: "shadow", count: countedKeys}.sql(),
		fmt.Sprintf("select ratelimit_define_policy('line', %d, 1, '30 minutes')", capacity),
		fill{policy: "line", count: countedKeys}.sql(),
		"select ratelimit_override('overrides', 'another', 10)",
		fmt.Sprintf("select ratelimit_override('overridden', '%s' || i, %d) from generate_series(1, %d) as i", userPrefix, capacity, countedKeys),
		fmt.Sprintf(`select ratelimit_override('zoned', '%s' || i, time_zone => 'Europe/Berlin', anchor => '2024-01-31 00:00') from generate_series(1, %d) as i`,
			userPrefix, countedKeys),
		"select ratelimit_define_policy('slots', 20, lease => '1 day')",
		"select ratelimit_override('slots', 'crowd', 10000)",
		fmt.Sprintf("select ratelimit_hold('slots', '%s' || k, h::text) from generate_series(1, %d) as k, generate_series(1, 5) as h", userPrefix, countedKeys),
		"select ratelimit_hold('slots', 'crowd', h::text) from generate_series(1, 1000) as h",
		"create sequence new_keys",
	}, inUse, []string{"vacuum analyze"})
}

// prepare fills a database, and leaves its server stopped.
func (i *instructions) prepare(ctx context.Context) {
	i.valgrind = must(pgtest.Program(ctx, "valgrind"))
	// Neither the machine's memory nor what goes on beside decides what the rows are like.
	i.pg = startPostgres(ctx, "shared_buffers=256MB", "autovacuum=off")
	i.pg.database(ctx, instructionsDatabase, slices.Concat([]string{tickingClock}, bareTables(countedKeys), countedPolicies())...)
	i.version = queryRow[string](ctx, i.pg, "", "select version()")
	check(i.pg.Stop(ctx, false))
}

// tickingClock makes each transaction that writes a millisecond, for 1 % of a decision: how long ago a bucket was asked for is in some of the arithmetic.
const tickingClock = `create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe
	as $$ select timestamptz '2030-01-01 00:00:00+00' + pg_catalog.age(xid '3') * interval '1 millisecond' $$`

// cleaned is done before each statement, so that none finds what others have left.
const cleaned = "truncate ratelimit.idempotency_keys;\nvacuum ratelimit.buckets, ratelimit.ephemeral_buckets, ratelimit.slots, ratelimit.leases, bare;\n"

// A session calls the function of the marker before and after what is counted, and valgrind writes what it has counted since. A session
// that is not counted prints which transaction id and which byte of WAL is next.
const (
	marker      = "pg_backend_pid"
	markedLine  = "execute mark;\n"
	countedMark = "prepare mark as select " + marker + "();\n"
	writtenMark = "prepare mark as select pg_snapshot_xmax(pg_current_snapshot()) || ' ' || pg_current_wal_insert_lsn() - '0/0' as mark;\n"
)

var (
	since   = regexp.MustCompile(`(?m)^summary: (\d+)$`)
	written = regexp.MustCompile(`mark = "(\d+) (\d+)"`)
)

// count returns what a decision executes and writes by the name of its statement: instructions from one session, the rest from another.
func (i *instructions) count(ctx context.Context) (map[string]writing, error) {
	session := markedLine + markedLine + markedLine
	for n, c := range countedStatements {
		session += cleaned + c.session(fmt.Sprint("call", n))
	}
	// What is new to the database, such as the keys that are replayed, is known from here on.
	printed := i.session(ctx, writtenMark+session)
	out := filepath.Join(i.pg.data, "callgrind.out")
	i.session(ctx, countedMark+session, i.valgrind, "--tool=callgrind", "--callgrind-out-file="+out, "--combine-dumps=yes", "--dump-before="+marker,
		"--toggle-collect=pgstat_report_stat", "--collect-atstart=yes") // but for the statistics that it sends once a second of real time
	text := must(os.ReadFile(out))
	var counts []float64
	for _, match := range since.FindAllSubmatch(text, -1) {
		counts = append(counts, number(string(match[1])))
	}
	// One is of the start, two of nothing but a mark, two of each statement, and one of the end.
	if len(counts) != 4+2*len(countedStatements) {
		return nil, fmt.Errorf("valgrind has %d counts of %d statements", len(counts), len(countedStatements))
	}
	mark := counts[2] // the second mark in a row, for which all is warm
	marks := written.FindAllStringSubmatch(printed, -1)
	if len(marks) != 3+2*len(countedStatements) {
		return nil, fmt.Errorf("the session has printed %d marks of %d statements", len(marks), len(countedStatements))
	}
	decisions := map[string]writing{}
	for n, c := range countedStatements {
		count, begin, end := float64(c.calls()*max(1, c.keys)), marks[3+2*n], marks[4+2*n]
		decisions[c.name] = writing{(counts[4+2*n] - mark) / count, (number(end[1]) - number(begin[1])) / count, (number(end[2]) - number(begin[2])) / count}
	}
	return decisions, nil
}

// session runs statements in a server of one process, perhaps by another program, as the owner of its data, and returns what it prints.
func (i *instructions) session(ctx context.Context, statements string, by ...string) string {
	info := must(os.Stat(i.pg.data))
	command := slices.Concat(by, []string{filepath.Join(i.pg.bin, "postgres"), "--single", "-D", i.pg.data, "-c", "synchronous_commit=off", "-c", "full_page_writes=off", instructionsDatabase})
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = i.pg.data
	cmd.Stdin = strings.NewReader(statements)
	if owner := info.Sys().(*syscall.Stat_t); os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	}
	out := output(cmd)
	if strings.Contains(out, "ERROR:") {
		panic(failure{fmt.Errorf("%s: a statement failed\n%s", command[0], out)})
	}
	return out
}

func (c counted) calls() int {
	if c.keys > 0 {
		return 2
	}
	return 16
}

// warmCalls is how often a statement is called before at least: a session plans its first five calls anew, and its sixth for good.
const warmCalls = 8

// before returns a line before the calls. It has the quota turn, so that each key has a period to close.
func (c counted) before() string {
	if c.name != "packed-turn-32" {
		return ""
	}
	return "update ratelimit.policies set anchor = ratelimit.clock() at time zone 'UTC' where name = 'history';\n"
}

// session returns lines for a server of one process: the statement is prepared and called, and then called as before between two marks.
func (c counted) session(name string) string {
	keys := rand.New(rand.NewPCG(1, 2)) // the same for all statements
	argument := func() string { return fmt.Sprintf("'%s%d'", userPrefix, 1+keys.IntN(countedKeys)) }
	kind := "text"
	if c.keys > 0 {
		one := argument
		kind, argument = "text[]", func() string {
			batch := make([]string, c.keys)
			for k := range batch {
				batch[k] = one()
			}
			return "array[" + strings.Join(batch, ", ") + "]"
		}
	}
	var calls strings.Builder
	for range c.calls() {
		fmt.Fprintf(&calls, "execute %s (%s);\n", name, argument())
	}
	warm := (warmCalls + c.calls() - 1) / c.calls()
	return fmt.Sprintf("prepare %s (%s) as %s;\n", name, kind, c.sql) + strings.Repeat(c.before()+calls.String(), warm) + c.before() +
		markedLine + calls.String() + markedLine
}

func (i *instructions) close(context.Context) error {
	if i.pg == nil {
		return nil
	}
	return i.pg.Close()
}
