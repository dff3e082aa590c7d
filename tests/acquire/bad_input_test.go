package acquire

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A badCall has to fail with this SQLSTATE and this constant message, and a DETAIL that names the
// argument (or, for an unknown policy, the policy).
type badCall struct {
	sql                     string
	args                    []any
	code, message, argument string
}

func (c badCall) String() string { return fmt.Sprintf("%.160s", fmt.Sprint(c.sql, " ", c.args)) }

func invalid(argument, sql string, args ...any) badCall {
	return badCall{sql, args, "22023", "invalid " + argument, argument}
}

func badCalls(serverVersion int) []badCall {
	var calls []badCall
	add := func(call badCall) { calls = append(calls, call) }
	const define = "select ratelimit_define_policy($1::text, $2::bigint, $3::bigint, $4::text::interval, remember => $5::text::interval)"
	const override = "select ratelimit_override($1::text, 'k', $2::bigint, $3::bigint, $4::text::interval, $5::text::timestamptz)"
	tooLong := strings.Repeat("é", 256) + "x" // 257 characters, 513 bytes
	badNames := []any{nil, "", strings.Repeat("x", 513), tooLong}
	each := func(argument string, args []any, functions ...string) {
		for _, call := range functions {
			add(invalid(argument, "select ratelimit_"+call, args...))
		}
	}
	policyArgument := []string{
		"acquire($1::text, 'k')", "acquire($1::text, 'k', 0)", "acquire($1::text, 'k', 1, 'first')", "peek($1::text, 'k')", "refund($1::text, 'k', 1)",
		"reset($1::text, 'k')", "drop_policy($1::text)", "override($1::text, 'k', 1)", "remove_override($1::text, 'k')",
		"acquire_all(array[$1::text, 'durable'], '{k,k}')", "acquire_all(array['durable', $1::text], '{k,l}', '{1,0}', 'first')",
	}
	for _, name := range badNames[1:] { // null means any
		add(invalid("policy", "select ratelimit_overrides($1::text)", name))
		add(invalid("key", "select ratelimit_overrides('durable', $1::text)", name))
	}
	add(badCall{"select ratelimit_overrides($1::text)", []any{"nobody"}, "RL001", "unknown policy", "nobody"})
	for _, name := range badNames {
		each("policy", []any{name}, policyArgument...)
		add(invalid("policy", define, name, 10, 1, "1 second", nil))
	}
	for _, call := range policyArgument {
		add(badCall{"select ratelimit_" + call, []any{"nobody"}, "RL001", "unknown policy", "nobody"})
	}
	for _, policy := range []string{"durable", "ephemeral"} {
		for _, key := range badNames {
			each("key", []any{policy, key}, "acquire($1::text, $2::text)", "acquire($1::text, $2::text, 1, 'first')", "peek($1::text, $2::text)",
				"refund($1::text, $2::text, 1)", "reset($1::text, $2::text)", "override($1::text, $2::text, 1)", "remove_override($1::text, $2::text)",
				"acquire_all(array[$1, 'durable'], array[$2::text, 'l'])")
			if key != nil {
				each("idempotency_key", []any{policy, key}, "acquire($1::text, 'k', 1, $2::text)", "acquire_all(array[$1::text], '{k}', '{0}', $2::text)")
			}
		}
		for _, tokens := range []any{nil, -1, int64(math.MinInt64)} {
			each("cost", []any{policy, tokens}, "acquire($1::text, 'k', $2::bigint)", "acquire($1::text, 'k', $2::bigint, 'first')",
				"peek($1::text, 'k', $2::bigint)", "acquire_all(array['durable', $1::text], '{k,l}', array[1, $2::bigint])")
			each("amount", []any{policy, tokens}, "refund($1::text, 'k', $2::bigint)")
		}
		for _, cost := range []any{1, 4, int64(math.MaxInt64)} { // 3 were taken
			for _, call := range []string{"acquire($1::text, 'k', $2::bigint, 'first')", "acquire_all(array['durable', $1::text], '{l,k}', array[1, $2::bigint], 'first')"} {
				add(badCall{"select ratelimit_" + call, []any{policy, cost}, "RL002", "idempotency key used before with another cost", "first"})
			}
		}
		add(invalid("durable", "select ratelimit_define_policy($1::text, 10, 1, '1 second', durable => $2::boolean)", policy, policy != "durable"))
	}
	// Arguments are checked in their order, and all of them before the policy is looked up.
	for _, policy := range []string{"durable", "nobody"} {
		all := []string{"acquire($1::text, '', -1, '')", "peek($1::text, '', -1)", "refund($1::text, '', -1)", "reset($1::text, '')"}
		each("policy", []any{""}, all...)
		each("key", []any{policy}, all...)
		each("cost", []any{policy}, "acquire($1::text, 'k', -1, '')", "peek($1::text, 'k', -1)")
		each("amount", []any{policy}, "refund($1::text, 'k', -1)")
		each("idempotency_key", []any{policy}, "acquire($1::text, 'k', 1, '')")
	}
	for _, policy := range []string{"durable", "new"} {
		for _, tokens := range []any{-1, 9_000_000_000_001, int64(math.MaxInt64), int64(math.MinInt64)} {
			add(invalid("capacity", define, policy, tokens, 1, "1 second", nil))
			add(invalid("refill", define, policy, 1, tokens, "1 second", nil))
			add(invalid("capacity", override, "durable", tokens, 1, "1 second", nil))
			add(invalid("refill", override, "durable", 1, tokens, "1 second", nil))
		}
		spans := []any{
			"0", "-1 microsecond", "-1 day", "1 day -24 hours", "0.0000001 seconds",
			"1 month", "1 month -30 days", "1 year", "1000 years", "-1 month", "11 months 3 days",
			"365250 days 0.000001 seconds", "365251 days", "8766001 hours", "2147483647 days", "2562047788 hours", "178000000 years",
		}
		if serverVersion >= 17 {
			spans = append(spans, "infinity", "-infinity")
		}
		for _, span := range spans {
			add(invalid("every", define, policy, 1, 1, span, nil))
			add(invalid("every", override, "durable", 1, 1, span, nil))
			add(invalid("remember", define, policy, 1, 1, "1 second", span))
		}
		add(invalid("refill", define, policy, 11, 1, "365250 days", nil)) // 11,000 years to fill
		add(invalid("refill", define, policy, 9_000_000_000_000, 1, "1 second", nil))
		add(invalid("refill", define, policy, 3_652_500, 1, "1 day 0.000001 seconds", nil))
	}
	const quota = "select ratelimit_define_policy($1::text, 10, period => $2::text::interval, time_zone => $3::text, anchor => $4::text::timestamp)"
	periods := []any{"0", "1 hour", "24 hours", "1 day 1 hour", "1 day -1 month", "1 month 1 day", "-1 day", "-1 month", "365251 days", "12001 months", "1000 years 1 month", "0.5 days"}
	if serverVersion >= 17 {
		periods = append(periods, "infinity", "-infinity")
	}
	for _, period := range periods {
		add(invalid("period", quota, "new", period, nil, nil))
	}
	for _, zone := range []string{"", "utc", "Z", "UTC+3", "CET", "EST", "EST5EDT", "europe/berlin", "Europe/Berlin ", "posix/Europe/Berlin", "right/UTC", "Nowhere/Land", "<x>3/y"} {
		add(invalid("time_zone", quota, "new", "1 month", zone, nil))
	}
	for _, anchor := range []string{"infinity", "-infinity", "0001-12-31 23:59:59.999999 BC", "10000-01-01"} {
		add(invalid("anchor", quota, "new", "1 month", "UTC", anchor))
	}
	add(invalid("period", quota, "durable", "1 day", nil, nil)) // a policy that refills stays one
	add(invalid("time_zone", "select ratelimit_define_policy('durable', time_zone => 'UTC')"))
	add(invalid("anchor", "select ratelimit_define_policy('durable', anchor => '2024-01-31')"))
	add(invalid("refill", "select ratelimit_define_policy('new', 10, 0, period => '1 day')"))
	add(invalid("every", "select ratelimit_define_policy('new', 10, every => '1 day', period => '1 day')"))
	add(invalid("stepped", "select ratelimit_define_policy('new', 10, stepped => false, period => '1 day')"))
	add(invalid("capacity", "select ratelimit_define_policy('new', period => '1 day')"))
	add(invalid("refill", "select ratelimit_define_policy('quota', refill => 1)"))
	add(invalid("time_zone", "select ratelimit_override('durable', 'k', time_zone => 'UTC')"))
	add(invalid("anchor", "select ratelimit_override('durable', 'k', anchor => '2024-01-31')"))
	add(invalid("refill", "select ratelimit_override('quota', 'k', refill => 1)"))
	add(invalid("every", "select ratelimit_override('quota', 'k', every => '1 day')"))
	add(invalid("time_zone", "select ratelimit_override('quota', 'k', time_zone => 'CET')"))
	add(invalid("anchor", "select ratelimit_override('quota', 'k', anchor => 'infinity')"))
	add(invalid("capacity", define, "new", nil, 1, "1 second", nil))
	add(invalid("refill", define, "new", 10, nil, "1 second", nil))
	add(invalid("every", define, "new", 10, 1, nil, nil))
	add(invalid("refill", define, "durable", 9_000_000_000_000, nil, nil, nil)) // one number with those that are there
	// An override's numbers with the policy's, which are 10 an hour and a capacity of 10.
	add(invalid("refill", override, "durable", 9_000_000_000_000, nil, nil, nil))
	for _, expires := range []string{"-infinity", "epoch", "yesterday"} {
		add(invalid("expires_at", override, "durable", nil, nil, nil, expires))
	}
	many := "select ratelimit_acquire_many($1::text[], $2::text[], $3::bigint[], $4::text[])"
	one, two := []string{"durable"}, []string{"k", "k"}
	add(invalid("policies", many, nil, one, nil, nil))
	add(invalid("keys", many, one, nil, nil, nil))
	add(invalid("keys", many, one, two, nil, nil))
	add(invalid("keys", many, two, one, []int64{1, 1}, nil))
	add(invalid("keys", many, []string{}, one, nil, nil))
	add(invalid("costs", many, one, one, []int64{1, 1}, nil))
	add(invalid("costs", many, one, one, []int64{}, nil))
	add(invalid("idempotency_keys", many, one, one, nil, two))
	add(invalid("idempotency_keys", many, one, one, []int64{1}, []string{}))
	all := "select ratelimit_acquire_all($1::text[], $2::text[], $3::bigint[])"
	add(invalid("policies", all, nil, one, nil))
	add(invalid("policies", all, []string{}, []string{}, nil))
	add(invalid("policies", all, slices.Repeat(one, 1001), slices.Repeat(one, 1001), nil))
	add(invalid("keys", all, one, nil, nil))
	add(invalid("keys", all, one, two, nil))
	add(invalid("costs", all, one, one, []int64{1, 1}))
	for _, function := range []string{"ratelimit_acquire_many", "ratelimit_acquire_packed"} {
		parts := "select " + function + "($1::text[], $2::text[], $3::bigint[], sizes => $4::integer[], idempotency_keys => $5::text[])"
		add(invalid("policies", parts, nil, one, nil, []int32{1}, nil))
		add(invalid("keys", parts, one, two, nil, []int32{1}, nil))
		add(invalid("costs", parts, one, one, []int64{}, []int32{1}, nil))
		for _, sizes := range [][]*int32{{}, {nil}, {new(int32(2))}, {new(int32(2)), new(int32(-1))}, {new(int32(0))}, {new(int32(1)), nil}} {
			add(invalid("sizes", parts, one, one, nil, sizes, nil))
		}
		add(invalid("idempotency_keys", parts, one, one, nil, []int32{1}, two))
	}
	for _, rows := range []any{nil, 0, -1, math.MinInt32} {
		add(invalid("max_rows", "select ratelimit_cleanup($1::integer)", rows))
		add(invalid("max_rows", "select ratelimit_overrides(max_rows => $1::integer)", rows))
	}
	for _, budget := range []any{nil, "0", "-1 second"} {
		add(invalid("budget", "call ratelimit_cleanup_all($1::text::interval)", budget))
	}
	return calls
}

func TestBadInput_IsRefusedAndChangesNothing(t *testing.T) {
	db := kit.ParallelDB(t)
	for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		db.Policy(name, 10, 1, time.Hour, durability).Take(name, "k", 3, "first")
	}
	db.Execute("select ratelimit_define_policy('quota', 10, period => '1 month')")
	before := kit.RowsOf(t, db.DB)
	require.Len(t, before, 8, "3 policies, 2 buckets, 2 idempotency keys and the version")
	conn := db.Connect(t)
	for i, call := range badCalls(int(db.Number("select current_setting('server_version_num')::integer / 10000"))) {
		protocol := kit.Protocols[i%len(kit.Protocols)]
		_, err := conn.Exec(context.Background(), call.sql, append([]any{protocol}, call.args...)...)
		var refusal *pgconn.PgError
		require.ErrorAs(t, err, &refusal, "%s, %s", call, protocol)
		require.Equal(t, call.code, refusal.Code, "%s, %s: %s", call, protocol, refusal.Message)
		require.Equal(t, call.message, refusal.Message, "%s, %s", call, protocol)
		require.Contains(t, refusal.Detail, call.argument, "%s, %s", call, protocol)
		require.Regexp(t, `^[A-Z].*\.$`, refusal.Hint, "%s, %s", call, protocol)
	}
	require.Equal(t, before, kit.RowsOf(t, db.DB))
}

func TestBadInput_InABatch(t *testing.T) {
	db := kit.ParallelDB(t)
	for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		db.Policy(name, 10, 1, time.Hour, durability).Take(name, "k", 3, "first")
	}
	var requests []kit.NullableRequest
	for _, policy := range []string{"durable", "ephemeral"} {
		for _, name := range []*string{nil, new(""), new(strings.Repeat("é", 256) + "x")} {
			requests = append(requests, kit.NullableRequest{Policy: name, Key: new("k"), Cost: new(int64(1)), IdempotencyKey: nil},
				kit.NullableRequest{Policy: &policy, Key: name, Cost: new(int64(1)), IdempotencyKey: nil}, kit.NullableRequest{Policy: &policy, Key: name, Cost: new(int64(0)), IdempotencyKey: nil})
			if name != nil {
				requests = append(requests, kit.NullableRequest{Policy: &policy, Key: new("k"), Cost: new(int64(1)), IdempotencyKey: name})
			}
		}
		requests = append(requests, kit.RequestOf("nobody", "k", 1), kit.NullableRequest{Policy: &policy, Key: new("k"), Cost: nil, IdempotencyKey: nil},
			kit.RequestOf(policy, "k", -1), kit.RequestOf(policy, "k", 4, "first"))
	}
	tx := kit.NoError(db.Pool.Begin(t.Context()))(t)
	defer tx.Rollback(t.Context())
	want := kit.NoError(acquireEach(tx, requests))(t)
	bad := len(requests)
	got := kit.SendBatch(t, db.Pool, kit.AcquireMany, append(requests, kit.RequestOf("durable", "k", 2), kit.RequestOf("ephemeral", "k", 2))...)
	require.Equal(t, want, got[:bad])
	for _, a := range got[:bad] {
		require.Nil(t, a.Decision, a.Error)
	}
	require.Equal(t, []int64{5, 5}, []int64{got[bad].Decision.Remaining, got[bad+1].Decision.Remaining})
}

// A batch is the elements of its arrays in storage order, whatever their dimensions and lower bounds.
func TestBadInput_ArraysOfAnyShapeAreOneBatch(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0)
	for name, durability := range map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral} {
		db.DefinePolicy(name, 10, 1, time.Hour, durability)
	}
	const elements = `'a','b','a','c','a','b'`
	answers := func(policies, keys, costs, idempotencyKeys string) []string {
		for _, table := range kit.StateTables {
			db.Execute("delete from " + table)
		}
		db.Execute("select ratelimit_acquire(p, k) from unnest(array['durable', 'ephemeral']) as p, unnest(array['a', 'b', 'c']) as k")
		batch := fmt.Sprintf("select format('%%s %%s', request, m) from ratelimit_acquire_many(%s, %s, %s, %s) as m",
			policies, keys, costs, idempotencyKeys)
		return append(kit.Column(t, db.DB, batch), kit.Column(t, db.DB, batch)...)
	}
	for _, policies := range []string{"{durable,durable,durable,durable,durable,durable}", "[7:12]={durable,ephemeral,durable,ephemeral,durable,ephemeral}"} {
		for _, last := range []string{"z", "y"} { // the second is used twice
			want := answers("'"+policies+"'", "array["+elements+"]", "array[1, 2, 3, 4, 5, 6]::bigint[]", "array[null, 'x', 'y', null, '"+last+"', null]")
			require.Len(t, want, 12)
			for i, keys := range []string{"'{{a,b},{a,c},{a,b}}'", "'[-5:-3][9:10]={{a,b},{a,c},{a,b}}'", "'[0:5]={a,b,a,c,a,b}'", "'{{{{{{a,b,a,c,a,b}}}}}}'"} {
				costs := []string{"'{{1,2,3},{4,5,6}}'", "'[2:7]={1,2,3,4,5,6}'"}[i%2]
				require.Equal(t, want, answers("'"+policies+"'", keys, costs, "'{{null,x,y},{null,"+last+",null}}'"), "%s %s", keys, costs)
			}
		}
	}
}

func TestBadInput_HugeArrays(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 1_000_000, 1, time.Hour)
	const n = 20_000
	rows := kit.Column(t, db.DB, `
		select format('%s %s', coalesce(error_code, 'allowed'), count(*))
		 from ratelimit_acquire_many((select array_agg(case i % 4 when 0 then 'p' when 1 then 'nobody' when 2 then null else '' end order by i) from generate_series(1, $1) as i),
		 array_fill('k'::text, array[$1])) group by error_code order by 1`, n)
	require.Equal(t, []string{"22023 10000", "RL001 5000", "allowed 5000"}, rows)
	require.EqualValues(t, 1_000_000-n/4, db.Left("p", "k"))
	require.Zero(t, db.Number("select count(*) from ratelimit_acquire_many('{}', '{}')"), "no request, no answer")
	before := kit.RowsOf(t, db.DB)
	for _, sql := range []string{
		"select ratelimit_acquire_many(array_fill(null::text, array[1000000]), array['k'])",
		"select ratelimit_acquire_many(array['p'], array_fill(null::text, array[1000000]))",
		"select ratelimit_acquire_many(array['p'], array['k'], array_fill(1::bigint, array[1000000]))",
		"select ratelimit_acquire_many(array['p'], array['k'], null, array_fill(null::text, array[1000000]))",
		"select ratelimit_acquire('p', repeat('x', 1000000))", "select ratelimit_acquire(repeat('x', 1000000), 'k', 1, repeat('x', 1000000))",
		"select ratelimit_define_policy(repeat('x', 1000000), 1, 1, '1 second')",
	} {
		_ = db.Refused("22023", sql)
	}
	require.Equal(t, before, kit.RowsOf(t, db.DB))
}

func TestErrors_CountOneAndSeveral(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0).Policy("p", 10, 1, time.Second).Take("p", "k", 10)
	for call, want := range map[string]string{
		"acquire_many('{p,p}', '{k}')":                            "keys is 1 element long, policies 2.",
		"acquire_many('{p}', '{k,l}')":                            "keys is 2 elements long, policies 1.",
		"acquire_many('{p}', '{k}', sizes => '{2}')":              "sizes is 2 in sum, policies 1 element long.",
		"acquire_many('{p,p}', '{k,l}', sizes => '{1}')":          "sizes is 1 in sum, policies 2 elements long.",
		"acquire_many('{p,p}', '{k,l}', '{1,1}', '{i}', '{1,1}')": "idempotency_keys is 1 element long, sizes 2.",
	} {
		require.Equal(t, want, db.Refused("22023", "select ratelimit_"+call).Detail, call)
	}
	for cost, want := range map[int64]string{1: "Try again in 1 second.", 2: "Try again in 2 seconds.", 3: "Try again in 3 seconds."} {
		_, err := db.Pool.Exec(t.Context(), "select ratelimit_enforce('p', 'k', $1)", cost)
		denial, ok := client.AsDenial(err)
		require.True(t, ok, "%v", err)
		require.Equal(t, want, kit.PgError(err).Hint)
		fakes := kit.PgError(clienttest.DenialError(denial))
		require.Equal(t, []string{kit.PgError(err).Detail, want}, []string{fakes.Detail, fakes.Hint})
	}
}
