package kit

import (
	"context"
	"regexp"
	"strings"

	"github.com/stretchr/testify/require"
)

// A Mutation changes the one place in a function that its pattern matches, in the private database
// of one test: a branch is removed, to see its test fail.
type Mutation struct {
	Pattern     string // a regexp in which a space is any white space
	Replacement string
}

// Mutate changes ratelimit_acquire, or another function, and returns the way back.
func (db *TestDB) Mutate(m Mutation, function ...string) (undo func()) {
	name := append(function, "ratelimit_acquire")[0]
	var source string
	require.NoError(db.T, db.Pool.QueryRow(context.Background(), "select pg_get_functiondef($1::regproc)", name).Scan(&source))
	pattern := regexp.MustCompile(strings.ReplaceAll(m.Pattern, " ", `\s+`))
	require.Len(db.T, pattern.FindAllString(source, -1), 1, "places in %s that match\n%s", name, m.Pattern)
	db.Execute(pattern.ReplaceAllString(source, m.Replacement))
	return func() { db.Execute(source) }
}

// A Gate stops its own sessions at one place in a function, so that others can overtake them.
type Gate struct {
	Db     *TestDB
	Keeper *Session
	Remove func()
}

// GateBefore puts a gate before the place in ratelimit_acquire, or another function, that the pattern, as of a mutation, matches.
func (db *TestDB) GateBefore(pattern string, function ...string) *Gate {
	remove := db.Mutate(Mutation{pattern, `
		perform pg_advisory_xact_lock_shared(1) where current_setting('application_name') = 'gated';
		$0`}, function...)
	g := &Gate{db, db.Session(), remove}
	g.Keeper.Execute("select pg_advisory_lock(1)")
	return g
}

func (g *Gate) Session() *Session {
	s := g.Db.Session()
	s.Execute("set application_name = 'gated'")
	return s
}

func (g *Gate) Open() { g.Keeper.Execute("select pg_advisory_unlock(1)") }
