package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// instructions counts what the processor executes for one decision, by valgrind, in a server of one process.
// It hardly differs from run to run, whatever else the machine does. It has what begins and commits the
// statement, which "nothing" has alone, but neither the kernel nor a connection.
type instructions struct {
	pg       *postgres
	valgrind string
	counted  map[string]sample
}

const instructionsDatabase = "instructions"

const countedKeys = 1000

// A counted statement has the parameter $1, a key or an array of as many keys as it decides about.
type counted struct {
	keys int // 0 is one, and no array
	sql  string
}

var countedStatements = map[string]counted{
	"instructions/nothing":      {0, "select"},
	"instructions/select":       {0, "select from bare where policy_id = 1 and key = $1"},
	"instructions/update":       {0, takeSQL("$1")},
	"instructions/acquire":      {0, "select from ratelimit_acquire('full', $1)"},
	"instructions/denied":       {0, "select from ratelimit_acquire('dry', $1)"},
	"instructions/keyed":        {0, "select from ratelimit_acquire('full', $1, 1, gen_random_uuid()::text)"},
	"instructions/replayed":     {0, "select from ratelimit_acquire('full', $1, 1, 'again')"},
	"instructions/peek":         {0, "select from ratelimit_peek('full', $1)"},
	"instructions/overrides":    {0, "select from ratelimit_acquire('overrides', $1)"},
	"instructions/reserved":     {0, "select from ratelimit_reserve('full', $1, '1 hour')"},
	"instructions/waiting":      {0, "select from ratelimit_reserve('line', $1, '365 days')"},
	"instructions/up-to":        {0, "select from ratelimit_acquire_up_to('full', $1, 1)"},
	"instructions/charged":      {0, "select from ratelimit_charge('full', $1, 1)"},
	"instructions/joint":        {0, "select from ratelimit_acquire_all(array['full', 'second', 'third'], array[$1, $1, $1])"},
	"instructions/joint-denied": {0, "select from ratelimit_acquire_all(array['full', 'dry', 'third'], array[$1, $1, $1])"},
	"instructions/keyed-settled": {0, "select from (select gen_random_uuid()::text as key offset 0) as i," + // settled without keyed
		" ratelimit_acquire('full', $1, 1, i.key) as a, ratelimit_settle('full', $1, case when a.allowed then i.key end, 2)"},
	"instructions/joint-32": {32, "select from ratelimit_acquire_packed(" +
		"array(select (array['full', 'second', 'third'])[1 + i % 3] from generate_series(0, 95) as i)," +
		" array(select ($1::text[])[1 + i / 3] from generate_series(0, 95) as i), null, array_fill(3, array[32]))"},
	"instructions/batch-32":  {32, "select from ratelimit_acquire_many(array_fill(text 'full', array[32]), $1)"},
	"instructions/batch-128": {128, "select from ratelimit_acquire_many(array_fill(text 'full', array[128]), $1)"},
	"instructions/keyed-128": {128, "select from ratelimit_acquire_many(array_fill(text 'full', array[128]), $1, null," +
		" array(select gen_random_uuid()::text from generate_series(1, 128)))"},
	"instructions/hot-128":    {128, "select from ratelimit_acquire_many(array_fill(text 'full', array[128]), array_fill(($1::text[])[1], array[128]))"},
	"instructions/packed-32":  {32, "select from ratelimit_acquire_packed(array_fill(text 'full', array[32]), $1)"},
	"instructions/packed-128": {128, "select from ratelimit_acquire_packed(array_fill(text 'full', array[128]), $1)"},
	"instructions/packed-keyed-128": {128, "select from ratelimit_acquire_packed(array_fill(text 'full', array[128]), $1, null, null," +
		" array(select gen_random_uuid()::text from generate_series(1, 128)))"},
	"instructions/packed-hot-128": {128, "select from ratelimit_acquire_packed(array_fill(text 'full', array[128])," +
		" array_fill(($1::text[])[1], array[128]))"},
}

// morePolicies defines two for requests of three charges, one with an override of another key, and one whose buckets have
// less than a token.
func morePolicies() (sql []string) {
	for _, name := range []string{"second", "third", "overrides"} {
		sql = append(sql, definePolicy(name, true), fill{policy: name, count: countedKeys, tokens: capacity / 2}.sql())
	}
	return append(sql,
		fmt.Sprintf("select ratelimit_define_policy('line', %d, 1, '30 minutes')", capacity),
		fill{policy: "line", count: countedKeys}.sql(),
		"select ratelimit_override('overrides', 'another', 10)", "vacuum analyze ratelimit.buckets")
}

func (*instructions) cells() []string {
	return slices.Sorted(maps.Keys(countedStatements))
}

func (i *instructions) open(ctx context.Context, _ []string) (err error) {
	if i.valgrind, err = pgtest.Program(ctx, "valgrind"); err != nil {
		return err
	}
	if i.pg, err = startPostgres(ctx); err != nil {
		return err
	}
	i.counted = map[string]sample{}
	if err := i.pg.database(ctx, instructionsDatabase, slices.Concat(bareTables(), morePolicies())...); err != nil {
		return err
	}
	return i.pg.Stop(ctx, false)
}

func (i *instructions) run(ctx context.Context, cell string) (sample, error) {
	if s := i.counted[cell]; s != nil {
		return s, nil
	}
	statement := countedStatements[cell]
	calls := 256
	if statement.keys > 0 {
		calls = 32
	}
	if _, err := i.session(ctx, statement.session(calls, 1)); err != nil { // what is new to it is known from here on
		return nil, err
	}
	once, err := i.count(ctx, statement.session(calls, 1))
	if err != nil {
		return nil, err
	}
	twice, err := i.count(ctx, statement.session(calls, 2))
	if err != nil {
		return nil, err
	}
	s := sample{"instructions": (twice - once) / float64(calls*max(1, statement.keys))}
	i.counted[cell] = s
	return s, nil
}

var collected = regexp.MustCompile(`Collected : (\d+)`)

// count returns the instructions of a session. The first calls in it plan, and read the pages.
func (i *instructions) count(ctx context.Context, statements string) (float64, error) {
	out, err := i.session(ctx, statements, i.valgrind, "--tool=callgrind", "--callgrind-out-file=/dev/null")
	if err != nil {
		return 0, err
	}
	match := collected.FindStringSubmatch(out)
	if match == nil {
		return 0, fmt.Errorf("valgrind has no count:\n%s", out)
	}
	return number(match[1]), nil
}

// session runs statements in a server of one process, perhaps by way of another program, as the owner of
// its data.
func (i *instructions) session(ctx context.Context, statements string, by ...string) (string, error) {
	info, err := os.Stat(i.pg.data)
	if err != nil {
		return "", err
	}
	command := slices.Concat(by, []string{filepath.Join(i.pg.bin, "postgres"), "--single", "-D", i.pg.data, "-c", "synchronous_commit=off", instructionsDatabase})
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Dir = i.pg.data
	cmd.Stdin = strings.NewReader(statements)
	if owner := info.Sys().(*syscall.Stat_t); os.Geteuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}
	}
	out, err := cmd.CombinedOutput()
	if err == nil && strings.Contains(string(out), "ERROR:") {
		err = errors.New("a statement failed")
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", command[0], err, out)
	}
	return string(out), nil
}

// session returns its statements, one a line, as a server of one process reads them.
func (c counted) session(calls, times int) string {
	keys := rand.New(rand.NewPCG(1, 2)) // the same in all sessions
	argument := func() string { return fmt.Sprintf("'user:%d'", 1+keys.IntN(countedKeys)) }
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
	var once strings.Builder
	for range calls {
		fmt.Fprintf(&once, "execute call (%s);\n", argument())
	}
	return fmt.Sprintf("prepare call (%s) as %s;\n", kind, c.sql) + strings.Repeat(once.String(), times)
}

// cost is that of the first round, spread over five.
func (*instructions) cost() time.Duration { return 2 * time.Second }

func (i *instructions) close(context.Context) error {
	if i.pg == nil {
		return nil
	}
	return i.pg.Close()
}
