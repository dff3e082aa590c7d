package tests

import (
	"context"
	"regexp"
	"strings"

	"github.com/stretchr/testify/require"
)

// A mutation changes the one place in a function that its pattern matches, in the private database
// of one test: a branch is removed, to see its test fail.
type mutation struct {
	pattern     string // a regexp in which a space is any white space
	replacement string
}

// settleTwice has ratelimit_settle count a settlement that was made already.
var settleTwice = mutation{`(update idempotency_keys as k set settled = [^;]*?)and k.settled is null`, "$1"}

// pauseBefore has other sessions come to the same place, where they would seldom meet by chance.
func pauseBefore(pattern string) mutation { return mutation{pattern, "perform pg_sleep(0.002); $0"} }

// mutate changes ratelimit_acquire, or another function, and returns the way back.
func (db *testDB) mutate(m mutation, function ...string) (undo func()) {
	name := append(function, "ratelimit_acquire")[0]
	var source string
	require.NoError(db.t, db.Pool.QueryRow(context.Background(), "select pg_get_functiondef($1::regproc)", name).Scan(&source))
	pattern := regexp.MustCompile(strings.ReplaceAll(m.pattern, " ", `\s+`))
	require.Len(db.t, pattern.FindAllString(source, -1), 1, "places in %s that match\n%s", name, m.pattern)
	db.exec(pattern.ReplaceAllString(source, m.replacement))
	return func() { db.exec(source) }
}

// A gate stops its own sessions at one place in a function, so that others can overtake them.
type gate struct {
	db     *testDB
	keeper *session
	remove func()
}

// gateBefore puts a gate before the place in ratelimit_acquire, or another function, that the pattern, as of a mutation, matches.
func (db *testDB) gateBefore(pattern string, function ...string) *gate {
	remove := db.mutate(mutation{pattern, `
		perform pg_advisory_xact_lock_shared(1) where current_setting('application_name') = 'gated';
		$0`}, function...)
	g := &gate{db, db.session(), remove}
	g.keeper.exec("select pg_advisory_lock(1)")
	return g
}

func (g *gate) session() *session {
	s := g.db.session()
	s.exec("set application_name = 'gated'")
	return s
}

func (g *gate) open() { g.keeper.exec("select pg_advisory_unlock(1)") }
