package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// Needs are what a program is going to ask of a database: see [Limiter.Check].
type Needs struct {
	// Calls are names of methods. Defaults to Acquire and AcquireAll.
	Calls []string

	// Policies are names of policies. If all Calls are about slots, they must lend slots; if none is, they must not. Defaults to none.
	Policies []string
}

// A NotReadyError lists all that a database lacks, a line each. Most of them are statements that help.
type NotReadyError struct{ Lacks []string }

// Error returns the lines.
func (e *NotReadyError) Error() string {
	return "pgratelimit: the database lacks what this limiter needs:\n" + strings.Join(e.Lacks, "\n")
}

var innerCapital = regexp.MustCompile(`\B[A-Z]`)

// functionsOf are the functions of methods that have others than their names say.
var functionsOf = map[string][]string{
	"Hold": {"hold", "renew", "release"}, "HoldWait": {"hold", "renew", "release"}, "HoldAs": {"hold"}, "Wait": {"reserve", "settle"},
	"AcquireMany": {"acquire"}, "RunCleanup": {"cleanup"},
}

// isOfSlots reports whether a method is about policies that lend slots.
func isOfSlots(method string) bool {
	return slices.Contains([]string{"Hold", "HoldWait", "HoldAs", "Renew", "Release"}, method)
}

const foundFunctions = `(
  select current_user::text as role, pg_catalog.json_agg(pg_catalog.json_build_object(
           'name', wanted.name, 'schema', found.schema, 'signature', found.signature,
           'visible', found.visible, 'usage', found.usage, 'execute', found.execute))::text as functions
    from pg_catalog.unnest($1::text[]) as wanted (name)
    left join lateral (
      select pg_catalog.quote_ident(n.nspname) as schema,
             pg_catalog.format('%I(%s)', p.proname, pg_catalog.oidvectortypes(p.proargtypes)) as signature,
             $2::text <> '' or pg_catalog.pg_function_is_visible(p.oid) as visible,
             pg_catalog.has_schema_privilege(n.oid, 'usage') as usage,
             pg_catalog.has_function_privilege(p.oid, 'execute') as execute
        from pg_catalog.pg_proc as p
        join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
       where p.proname = wanted.name and $2::text in ('', pg_catalog.quote_ident(n.nspname), '"' || n.nspname || '"')
       order by pg_catalog.pg_function_is_visible(p.oid) desc
       limit 1) as found on true) as answer`

type foundFunction struct {
	Name, Schema, Signature string
	Visible, Usage, Execute bool
}

// Check returns a *[NotReadyError] if the database lacks what a program needs: the package, a grant, a policy. It is for the start of a
// program, takes nothing, and needs no grant of its own. A database that is away is its own error.
func (l *limiter) Check(ctx context.Context, needs Needs) error { return l.check(ctx, needs) }

// Check is [Limiter.Check], also for the function by which requests share calls.
func (c *Combiner) Check(ctx context.Context, needs Needs) error {
	return c.check(ctx, needs, "acquire_packed")
}

// Check is [Combiner.Check], also for the functions that bring tokens and give them back.
func (l *Prefetcher) Check(ctx context.Context, needs Needs) error {
	if len(l.policies) == 0 {
		return l.combiner.Check(ctx, needs)
	}
	return l.check(ctx, needs, "acquire_packed", "acquire_up_to", "refund")
}

// Check is [Prefetcher.Check] of all shards, at the same time. Each error is in a [*ShardError].
func (s *Sharded) Check(ctx context.Context, needs Needs) error {
	return s.Each(func(_ int, on *Prefetcher) error { return on.Check(ctx, needs) })
}

// check is Check with the functions by which the limiter acquires, besides those of the calls.
func (l *limiter) check(ctx context.Context, needs Needs, acquiring ...string) error {
	calls := needs.Calls
	if len(calls) == 0 {
		calls = []string{"Acquire", "AcquireAll"}
	}
	lends, lendsNot := slices.ContainsFunc(calls, isOfSlots), slices.ContainsFunc(calls, func(m string) bool { return !isOfSlots(m) })
	if len(needs.Policies) > 0 {
		calls = append(slices.Clone(calls), map[bool]string{true: "Renew", false: "Acquire"}[lends]) // by which policies are asked
	}
	var names []string
	for _, method := range calls {
		functions, ok := functionsOf[method]
		if !ok {
			functions = []string{strings.ToLower(innerCapital.ReplaceAllString(method, "_$0"))}
		}
		if slices.Contains([]string{"Acquire", "AcquireAll", "AcquireMany"}, method) {
			functions = append(slices.Clone(functions), acquiring...)
		}
		for _, function := range functions {
			names = append(names, "ratelimit_"+function)
		}
	}
	if l.place != nil {
		names = append(names, "ratelimit_shard")
	}
	slices.Sort(names)
	names = append(slices.Compact(names), "ratelimit_version") // last, and no need: which tells whether the package is there
	schema := strings.TrimSuffix(l.schema, ".")
	c := newCall("check", foundFunctions, names, schema)
	c.columns, c.repeatable, c.isQuery = "role, functions", true, true
	var role, text string
	asks := *l
	asks.place = nil // or else a missing grant on ratelimit_shard would be the error
	if err := asks.query(ctx, c, &role, &text); err != nil {
		return err
	}
	var found []foundFunction
	if err := json.Unmarshal([]byte(text), &found); err != nil {
		return failed("check", err)
	}
	lacks := lacksOf(role, schema, found)
	asking := "ratelimit_" + map[bool]string{true: "renew", false: "acquire"}[lends]
	keepsFromAsking := func(f foundFunction) bool {
		return (f.Name == asking || f.Name == "ratelimit_shard") && (f.Schema == "" || !f.Usage || !f.Visible || !f.Execute)
	}
	if !slices.ContainsFunc(found, keepsFromAsking) {
		for _, policy := range needs.Policies {
			lack, err := l.lackOf(ctx, policy, lends, lendsNot)
			if err != nil {
				return err
			}
			lacks = append(lacks, lack...)
		}
	}
	if len(lacks) > 0 {
		return &NotReadyError{lacks}
	}
	return nil
}

func lacksOf(role, schema string, found []foundFunction) (lacks []string) {
	isMissing := func(f foundFunction) bool { return f.Schema == "" }
	if !slices.ContainsFunc(found, func(f foundFunction) bool { return !isMissing(f) }) {
		place := "this database"
		if schema != "" {
			place = "schema " + schema + " of this database"
		}
		return []string{"pgratelimit is not installed in " + place + ": run migrations/psql/install.sql"}
	}
	for _, f := range found[:len(found)-1] {
		usage := fmt.Sprintf("grant usage on schema %s to %q;", f.Schema, role)
		switch {
		case isMissing(f):
			lacks = append(lacks, f.Name+" is missing: bring pgratelimit up to date, or correct Calls")
			continue
		case !f.Usage && !slices.Contains(lacks, usage):
			lacks = append(lacks, usage)
		case f.Usage && !f.Visible:
			lacks = append(lacks, f.Name+" is in schema "+f.Schema+", which is not on search_path: name it with client.Schema")
		}
		if !f.Execute {
			lacks = append(lacks, fmt.Sprintf("grant execute on function %s.%s to %q;", f.Schema, f.Signature, role))
		}
	}
	return lacks
}

// lackOf asks a policy for nothing, by a call that takes nothing.
func (l *limiter) lackOf(ctx context.Context, policy string, lends, lendsNot bool) ([]string, error) {
	var err error
	if lends {
		_, err = l.Renew(ctx, policy, "check", "check")
	} else {
		_, err = l.ask(ctx, request{policy: policy, key: "check"}) // for no tokens
	}
	switch {
	case errors.Is(err, ErrUnknownPolicy):
		return []string{fmt.Sprintf("no policy is named %q: see the names in ratelimit_policies(), or define it", policy)}, nil
	case errors.Is(err, ErrInvalidArgument) && lends && lendsNot:
		return nil, nil // it is for the other calls
	case errors.Is(err, ErrInvalidArgument) && lends:
		return []string{fmt.Sprintf("the policy %q lends no slots: define it with a lease, or call Acquire", policy)}, nil
	case errors.Is(err, ErrInvalidArgument):
		return []string{fmt.Sprintf("the policy %q lends slots: call Hold", policy)}, nil
	}
	return nil, err
}
