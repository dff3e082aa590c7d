package tests

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/model"
)

// Every way of sending arguments: typed by the server, and written into the text.
var protocols = []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeSimpleProtocol}

// A badCall has to fail with this SQLSTATE and this constant message, and a DETAIL that names the
// argument (or, for an unknown policy, the policy).
type badCall struct {
	sql                     string
	args                    []any
	code, message, argument string
}

func (c badCall) String() string {
	return fmt.Sprintf("%.160s", fmt.Sprint(c.sql, " ", c.args))
}

func invalid(argument, sql string, args ...any) badCall {
	return badCall{sql, args, "22023", "invalid " + argument, argument}
}

func badCalls(serverVersion int) []badCall {
	var calls []badCall
	add := func(call badCall) { calls = append(calls, call) }

	const define = "select ratelimit_define_policy($1::text, $2::bigint, $3::bigint, $4::text::interval, remember => $5::text::interval)"
	tooLong := strings.Repeat("é", 256) + "x" // 257 characters, 513 bytes
	badNames := []any{nil, "", strings.Repeat("x", 513), tooLong}
	policyArgument := []string{
		"select ratelimit_acquire($1::text, 'k')",
		"select ratelimit_acquire($1::text, 'k', 0)",
		"select ratelimit_acquire($1::text, 'k', 1, 'first')",
		"select ratelimit_peek($1::text, 'k')",
		"select ratelimit_refund($1::text, 'k', 1)",
		"select ratelimit_reset($1::text, 'k')",
		"select ratelimit_drop_policy($1::text)",
	}
	for _, name := range badNames {
		for _, sql := range policyArgument {
			add(invalid("policy", sql, name))
		}
		add(invalid("policy", define, name, 10, 1, "1 second", nil))
	}
	for _, sql := range policyArgument {
		add(badCall{sql, []any{"nobody"}, "RL001", "unknown policy", "nobody"})
	}

	for _, policy := range []string{"durable", "ephemeral"} {
		for _, key := range badNames {
			add(invalid("key", "select ratelimit_acquire($1::text, $2::text)", policy, key))
			add(invalid("key", "select ratelimit_acquire($1::text, $2::text, 1, 'first')", policy, key))
			add(invalid("key", "select ratelimit_peek($1::text, $2::text)", policy, key))
			add(invalid("key", "select ratelimit_refund($1::text, $2::text, 1)", policy, key))
			add(invalid("key", "select ratelimit_reset($1::text, $2::text)", policy, key))
			if key != nil {
				add(invalid("idempotency_key", "select ratelimit_acquire($1::text, 'k', 1, $2::text)", policy, key))
			}
		}
		for _, tokens := range []any{nil, -1, int64(math.MinInt64)} {
			add(invalid("cost", "select ratelimit_acquire($1::text, 'k', $2::bigint)", policy, tokens))
			add(invalid("cost", "select ratelimit_acquire($1::text, 'k', $2::bigint, 'first')", policy, tokens))
			add(invalid("cost", "select ratelimit_peek($1::text, 'k', $2::bigint)", policy, tokens))
			add(invalid("amount", "select ratelimit_refund($1::text, 'k', $2::bigint)", policy, tokens))
		}
		for _, cost := range []any{1, 4, int64(math.MaxInt64)} { // 3 were taken
			add(badCall{
				"select ratelimit_acquire($1::text, 'k', $2::bigint, 'first')", []any{policy, cost},
				"RL002", "idempotency key used before with another cost", "first",
			})
		}
		add(invalid("durable", "select ratelimit_define_policy($1::text, 10, 1, '1 second', durable => $2::boolean)", policy, policy != "durable"))
	}

	// Arguments are checked in their order, and all of them before the policy is looked up.
	for _, policy := range []string{"durable", "nobody"} {
		add(invalid("policy", "select ratelimit_acquire($1::text, '', -1, '')", ""))
		add(invalid("policy", "select ratelimit_peek($1::text, '', -1)", ""))
		add(invalid("policy", "select ratelimit_refund($1::text, '', -1)", ""))
		add(invalid("policy", "select ratelimit_reset($1::text, '')", ""))
		add(invalid("key", "select ratelimit_acquire($1::text, '', -1, '')", policy))
		add(invalid("key", "select ratelimit_peek($1::text, '', -1)", policy))
		add(invalid("key", "select ratelimit_refund($1::text, '', -1)", policy))
		add(invalid("key", "select ratelimit_reset($1::text, '')", policy))
		add(invalid("cost", "select ratelimit_acquire($1::text, 'k', -1, '')", policy))
		add(invalid("cost", "select ratelimit_peek($1::text, 'k', -1)", policy))
		add(invalid("amount", "select ratelimit_refund($1::text, 'k', -1)", policy))
		add(invalid("idempotency_key", "select ratelimit_acquire($1::text, 'k', 1, '')", policy))
	}

	for _, policy := range []string{"durable", "new"} {
		for _, tokens := range []any{0, -1, 9_000_000_000_001, int64(math.MaxInt64), int64(math.MinInt64)} {
			add(invalid("capacity", define, policy, tokens, 1, "1 second", nil))
			add(invalid("refill", define, policy, 1, tokens, "1 second", nil))
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
			add(invalid("remember", define, policy, 1, 1, "1 second", span))
		}
		add(invalid("refill", define, policy, 11, 1, "365250 days", nil)) // 11,000 years to fill
		add(invalid("refill", define, policy, 9_000_000_000_000, 1, "1 second", nil))
		add(invalid("refill", define, policy, 3_652_500, 1, "1 day 0.000001 seconds", nil))
	}

	add(invalid("capacity", define, "new", nil, 1, "1 second", nil))
	add(invalid("refill", define, "new", 10, nil, "1 second", nil))
	add(invalid("every", define, "new", 10, 1, nil, nil))
	add(invalid("refill", define, "durable", 9_000_000_000_000, nil, nil, nil)) // one number with those that are there

	many := "select ratelimit_acquire_many($1::text[], $2::text[], $3::bigint[], $4::text[])"
	one, two := []string{"durable"}, []string{"k", "k"}
	add(invalid("policies", many, nil, one, nil, nil))
	add(invalid("keys", many, one, nil, nil, nil))
	add(invalid("keys", many, one, two, nil, nil))
	add(invalid("keys", many, two, one, []int64{1, 1}, nil))
	add(invalid("costs", many, one, one, []int64{1, 1}, nil))
	add(invalid("idempotency_keys", many, one, one, nil, two))

	for _, rows := range []any{nil, 0, -1, math.MinInt32} {
		add(invalid("max_rows", "select ratelimit_cleanup($1::integer)", rows))
	}
	for _, budget := range []any{nil, "0", "-1 second"} {
		add(invalid("budget", "call ratelimit_cleanup_all($1::text::interval)", budget))
	}
	return calls
}

func TestBadInput_IsRefusedAndChangesNothing(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	var version int
	require.NoError(t, db.Pool.QueryRow(context.Background(), "select current_setting('server_version_num')::integer / 10000").Scan(&version))
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.definePolicy(name, 10, 1, time.Hour, durability)
		db.acquire(name, "k", 3, "first")
	}
	before := rowsOf(t, db.DB)
	require.Len(t, before, 7, "2 policies, 2 buckets, 2 idempotency keys and the version")

	conn := db.Connect(t)
	for _, call := range badCalls(version) {
		for _, protocol := range protocols {
			_, err := conn.Exec(context.Background(), call.sql, append([]any{protocol}, call.args...)...)
			var refusal *pgconn.PgError
			require.ErrorAs(t, err, &refusal, "%s, %s", call, protocol)
			require.Equal(t, call.code, refusal.Code, "%s, %s: %s", call, protocol, refusal.Message)
			require.Equal(t, call.message, refusal.Message, "%s, %s", call, protocol)
			require.Contains(t, refusal.Detail, call.argument, "%s, %s", call, protocol)
			require.Regexp(t, `^[A-Z].*\.$`, refusal.Hint, "%s, %s", call, protocol)
		}
		require.Equal(t, before, rowsOf(t, db.DB), "%s", call)
	}
}

// A batch tells of each bad request what ratelimit_acquire would have, and decides the others.
func TestBadInput_InABatch(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := newDB(t)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.definePolicy(name, 10, 1, time.Hour, durability)
		db.acquire(name, "k", 3, "first")
	}
	var policies, keys, idempotencyKeys []*string
	var costs []*int64
	add := func(policy, key any, cost any, idempotencyKey any) {
		text := func(v any) *string {
			if s, ok := v.(string); ok {
				return &s
			}
			return nil
		}
		policies, keys, idempotencyKeys = append(policies, text(policy)), append(keys, text(key)), append(idempotencyKeys, text(idempotencyKey))
		if n, ok := cost.(int); ok {
			n := int64(n)
			costs = append(costs, &n)
		} else {
			costs = append(costs, nil)
		}
	}
	tooLong := strings.Repeat("é", 256) + "x"
	for _, policy := range []string{"durable", "ephemeral"} {
		for _, name := range []any{nil, "", tooLong} {
			add(name, "k", 1, nil)
			add(policy, name, 1, nil)
			add(policy, name, 0, nil)
			if name != nil {
				add(policy, "k", 1, name)
			}
		}
		add("nobody", "k", 1, nil)
		add(policy, "k", nil, nil)
		add(policy, "k", -1, nil)
		add(policy, "k", 4, "first")
	}
	bad := len(policies)
	for _, policy := range []string{"durable", "ephemeral"} {
		add(policy, "k", 2, nil)
	}

	rows, err := db.Pool.Query(ctx, `
		select error_code, error_message, error_detail, error_hint, remaining
		  from ratelimit_acquire_many($1, $2, $3, $4) order by request`, policies, keys, costs, idempotencyKeys)
	require.NoError(t, err)
	type answer struct {
		Code, Message, Detail, Hint *string
		Remaining                   *int64
	}
	answers, err := pgx.CollectRows(rows, pgx.RowToStructByPos[answer])
	require.NoError(t, err)
	require.Len(t, answers, len(policies))
	for i, got := range answers[:bad] {
		_, err := db.Pool.Exec(ctx, "select ratelimit_acquire($1, $2, $3, $4)", policies[i], keys[i], costs[i], idempotencyKeys[i])
		var want *pgconn.PgError
		require.ErrorAs(t, err, &want)
		require.Equal(t, answer{&want.Code, &want.Message, &want.Detail, &want.Hint, nil}, got)
	}
	five := int64(5)
	require.Equal(t, []answer{{Remaining: &five}, {Remaining: &five}}, answers[bad:])
}

// Within the caller's transaction, where what came before the error must stay as it was.
func TestBadInput_InASavepoint(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := newDB(t)
	db.definePolicy("durable", 10, 1, time.Hour)
	db.definePolicy("ephemeral", 10, 1, time.Hour, ephemeral)
	tx, err := db.Pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(ctx)
	for _, policy := range []string{"durable", "ephemeral"} {
		_, err = acquire(tx, policy, "k", 3, "first")
		require.NoError(t, err)
	}
	for _, call := range badCalls(15) {
		if strings.HasPrefix(call.sql, "call") {
			continue // commits
		}
		err := pgx.BeginFunc(ctx, tx, func(savepoint pgx.Tx) error {
			_, err := savepoint.Exec(ctx, call.sql, append([]any{pgx.QueryExecModeExec}, call.args...)...)
			return err
		})
		require.Equal(t, call.code, sqlState(err), "%s: %v", call, err)
	}
	require.NoError(t, tx.Commit(ctx))
	for _, policy := range []string{"durable", "ephemeral"} {
		require.EqualValues(t, 7, db.must(peek(db.Pool, policy, "k", 1)).Remaining)
	}
}

func TestBadInput_LargestValuesAreAnswered(t *testing.T) {
	t.Parallel()
	const (
		most      = 9_000_000_000_000
		year1000  = 365250 * 24 * 3600 * 1_000_000
		day       = 24 * 3600 * 1_000_000
		everMicro = model.Micros(1)
	)
	for _, durability := range []policyOption{durable, ephemeral} {
		db := newDB(t)
		policy := func(name string, capacity, refill int64, every, remember string) {
			db.exec("select ratelimit_define_policy($1, $2, $3, $4::text::interval, remember => $5::text::interval)", name, capacity, refill, every, remember)
		}
		var durable policyOptions
		durability(&durable)
		for _, name := range []string{"fast", "slow", "slowest"} {
			db.exec("select ratelimit_define_policy($1, 1, 1, '1 second', durable => $2)", name, durable.durable)
		}
		policy("fast", most, most, "1 microsecond", "1 microsecond")
		policy("slow", most, most, "365250 days", "365250 days")
		policy("slowest", 3_652_500, 1, "1 day", "8766000 hours") // fills in 10,000 years

		for name, full := range map[string]model.Micros{"fast": everMicro, "slow": year1000, "slowest": 10 * year1000} {
			var capacity int64
			require.NoError(t, db.Pool.QueryRow(context.Background(), "select capacity from ratelimit_policies() where policy = $1", name).Scan(&capacity))
			for _, cost := range []int64{capacity + 1, math.MaxInt64} {
				require.Equal(t, never(capacity, 0, capacity), db.acquireAt(t0, name, "k", cost), name)
				require.Equal(t, never(capacity, 0, capacity), db.acquire(name, "k", cost, "big"), name)
				require.Equal(t, never(capacity, 0, capacity), db.peekAt(t0, name, "k", cost), name)
			}
			require.Nil(t, db.bucket(name, "k"))

			taken := decision{Allowed: true, ResetAfter: full, Capacity: capacity}
			require.Equal(t, taken, db.acquireAt(t0, name, "k", capacity, "all"), name)
			require.Equal(t, replayed(taken), db.acquire(name, "k", capacity, "all"), name)
			require.Equal(t, decision{RetryAfter: full, ResetAfter: full, Capacity: capacity}, db.acquire(name, "k", capacity), name)
			require.Equal(t, never(0, 0, capacity).RetryAfter, db.acquire(name, "k", math.MaxInt64).RetryAfter, name)

			require.Equal(t, allowed(capacity, 0, capacity), db.refundAt(t0, name, "k", math.MaxInt64), name)
			require.Equal(t, allowed(capacity, 0, capacity), db.refundAt(t0, name, "unknown", math.MaxInt64), name)
		}
		require.Equal(t, allowed(3_652_499, day*time.Microsecond, 3_652_500), db.acquireAt(t0, "slowest", "other", 1))
		db.exec("select ratelimit_cleanup($1)", math.MaxInt32)
	}
}

func TestReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := newDB(t)
	for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
		db.definePolicy(name, 10, 1, time.Hour, durability)
		db.acquire(name, "known", 3)
		db.acquire(name, "granted", 3, "first")
	}
	before := rowsOf(t, db.DB)
	conn := db.Connect(t)
	execute(t, conn, "set default_transaction_read_only = on")

	for _, policy := range []string{"durable", "ephemeral"} {
		for _, key := range []string{"known", "unknown"} {
			for _, sql := range []string{
				"select ratelimit_acquire($1, $2)",
				"select ratelimit_acquire($1, $2, 10)",
				"select ratelimit_acquire($1, $2, 1, 'first')",
				"select ratelimit_acquire_many(array[$1::text], array[$2::text])",
				"select ratelimit_refund($1, $2, 1)",
				"select ratelimit_reset($1, $2)",
			} {
				_, err := conn.Exec(ctx, sql, policy, key)
				require.Equal(t, "25006", sqlState(err), "%s: %v", sql, err)
			}
			_, err := peek(conn, policy, key, 1)
			require.NoError(t, err)
			_, err = acquire(conn, policy, key, 0)
			require.NoError(t, err, "cost 0 writes nothing")
		}
		// Never, a replay and cost 0 write nothing, so they are answered: alone and in a batch.
		first, eleven, three, zero, known := "first", int64(11), int64(3), int64(0), "known"
		never, err := acquire(conn, policy, known, eleven)
		require.NoError(t, err)
		again, err := acquire(conn, policy, "granted", three, first)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		granted := "granted"
		replies, err := acquireMany(conn, []wish{
			{&policy, &known, &eleven, nil}, {&policy, &granted, &three, &first}, {&policy, &known, &zero, nil},
		})
		require.NoError(t, err)
		require.Equal(t, &again, replies[1].Decision)
		require.Equal(t, model.Never, replies[0].Decision.RetryAfter)
		require.Equal(t, never.Remaining, replies[0].Decision.Remaining)
		for _, wishes := range [][]wish{
			{{&policy, &known, &eleven, nil}, {&policy, &known, &eleven, nil}},
			{{&policy, &known, &eleven, nil}, {&policy, &granted, &eleven, nil}},
			{{&policy, &known, &eleven, nil}, {&policy, &granted, &three, &first}},
		} {
			replies, err = acquireMany(conn, wishes)
			require.NoError(t, err)
			require.Equal(t, model.Never, replies[0].Decision.RetryAfter)
		}
		for _, sql := range []string{"select ratelimit_define_policy($1, 10, 1, '1 hour')", "select ratelimit_drop_policy($1)"} {
			_, err := conn.Exec(ctx, sql, policy)
			require.Equal(t, "25006", sqlState(err), "%s: %v", sql, err)
		}
	}
	_, err := conn.Exec(ctx, "select ratelimit_cleanup()")
	require.Equal(t, "25006", sqlState(err), "%v", err)
	execute(t, conn, "select ratelimit_policies(), ratelimit_version()")
	require.Equal(t, before, rowsOf(t, db.DB))
}

// Texts that have broken other people's quoting, matching or indexing.
var oddTexts = []string{
	"it's", `"quoted"`, "''", `\`, `\'; drop table ratelimit.buckets; --`, "$$", "$1", "%s %I %L %", "{{ . }}", "null", "NULL",
	" ", "  ", "a", "A", "á", "a\u0301", "ä", "ß", "ss", "İ", "ı", "a ", " a", "a\t", "a\n", "a\r\n", "line\nbreak", "\u00a0", "\u200b", "\ufeff",
	"🚦", "👩‍👩‍👧‍👧", "\U0010ffff", strings.Repeat("語", 170) + "ab", strings.Repeat("🚦", 128), strings.Repeat("x", 512), "\x01\x7f",
}

func TestOddTexts_AreBucketsOfTheirOwn(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, mode := range protocols {
		for name, durability := range map[string]policyOption{"durable": durable, "ephemeral": ephemeral} {
			policy := fmt.Sprintf("%s %s", name, mode)
			db.definePolicy(policy, 1000, 1, time.Hour, durability)
			conn := db.Connect(t)
			q := inMode{conn, mode}
			for i, key := range oddTexts {
				cost := int64(i + 1)
				d, err := acquire(q, policy, key, cost, key)
				require.NoError(t, err, "%q", key)
				require.Equal(t, 1000-cost, d.Remaining, "%q is a bucket of its own", key)
				if len(key) < 512 {
					d, err = acquire(q, policy, key, 1, key+"?")
					require.NoError(t, err, "%q", key)
					require.Equal(t, 1000-cost-1, d.Remaining, "%q is an idempotency key of its own", key)
					_, err = refund(q, policy, key, 1)
					require.NoError(t, err)
				}
			}
			for i, key := range oddTexts {
				cost := int64(i + 1)
				d, err := acquire(q, policy, key, cost, key)
				require.NoError(t, err)
				require.True(t, d.Replayed)
				d, err = peek(q, policy, key, 1)
				require.NoError(t, err)
				require.Equal(t, 1000-cost, d.Remaining)
				_, err = conn.Exec(context.Background(), "select ratelimit_reset($1, $2)", mode, policy, key)
				require.NoError(t, err)
				require.Nil(t, db.bucket(policy, key))
			}
		}
	}
}

func TestOddTexts_ArePolicies(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for i, name := range oddTexts {
		db.definePolicy(name, int64(i+1), 1, time.Hour)
	}
	names := column(t, db.DB, "select policy from ratelimit_policies()")
	require.Equal(t, slices.Sorted(slices.Values(oddTexts)), names, "by byte")
	for i, name := range oddTexts {
		require.Equal(t, allowed(int64(i), time.Hour, int64(i+1)), db.acquireAt(t0, name, "k", 1, "first"), "%q", name)
		db.refundAt(t0, name, "k", 1)
		db.reset(name, "k")
		db.dropPolicy(name)
	}
	require.Empty(t, column(t, db.DB, "select policy from ratelimit_policies()"))
}

// A caller's collation must neither make two keys one nor leave the functions without any.
func TestCollations_StayOutside(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	collations := column(t, db.DB, `
		select quote_ident(collname) from pg_collation
		 where collname in ('C', 'POSIX', 'ucs_basic', 'und-x-icu', 'tr-x-icu', 'en_US.utf8', 'C.utf8', 'pg_c_utf8')
		   and collencoding in (-1, pg_char_to_encoding(getdatabaseencoding()))`)
	if slices.Contains(collations, `"und-x-icu"`) {
		db.exec("create collation careless (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
		collations = append(collations, "careless")
	} else {
		t.Log("the server was built without ICU: only the collations of libc are tried")
	}
	require.GreaterOrEqual(t, len(collations), 3)
	texts := []string{"key", "KEY", "kéy", "k\u00e9y ", "İ", "ı"}

	for i, collation := range collations {
		t.Run(collation, func(t *testing.T) {
			policy, table := fmt.Sprintf("policy %d", i), fmt.Sprintf("texts_%d", i)
			db.exec(fmt.Sprintf("create table %s (policy text collate %s, key text collate %[2]s, other text collate %s)",
				table, collation, collations[(i+1)%len(collations)]))
			for _, text := range texts {
				db.exec("insert into "+table+" values ($1, $2, $2)", policy, text)
			}
			every := "from " + table + " as t"

			db.exec("select ratelimit_define_policy(t.policy, 10, 1, '1 hour') " + every)
			for _, argument := range []string{"key", "other"} { // of two collations no one is chosen
				require.Equal(t, repeat("9", len(texts)), column(t, db.DB, fmt.Sprintf("select (ratelimit_acquire(t.policy, t.%s, 1, t.key)).remaining::text %s", argument, every)))
				require.Equal(t, repeat("9", len(texts)), column(t, db.DB, fmt.Sprintf("select (ratelimit_peek(t.policy, t.%s)).remaining::text %s", argument, every)))
				require.Equal(t, repeat("true", len(texts)), column(t, db.DB, fmt.Sprintf("select (ratelimit_acquire(t.policy, t.%s, 1, t.key)).replayed::text %s", argument, every)))
				require.Equal(t, repeat("10", len(texts)), column(t, db.DB, fmt.Sprintf("select (ratelimit_refund(t.policy, t.%s, 1)).remaining::text %s", argument, every)))
				db.exec(fmt.Sprintf("select ratelimit_reset(t.policy, t.%s) %s", argument, every))
				db.exec("delete from ratelimit.idempotency_keys")
			}
			for _, sql := range []string{
				"select ratelimit_acquire(t.policy, left(t.other, 0)) ", "select ratelimit_acquire(left(t.policy, 0), t.other) ",
				"select ratelimit_peek(t.policy, left(t.other, 0)) ", "select ratelimit_refund(t.policy, left(t.key, 0), 1) ",
				"select ratelimit_reset(left(t.policy, 0), t.other) ", "select ratelimit_acquire(t.policy, t.key, 1, left(t.other, 0)) ",
			} {
				_, err := db.Pool.Exec(context.Background(), sql+every)
				require.Equal(t, "22023", sqlState(err), "%s: %v", sql, err)
			}
			db.exec("select ratelimit_drop_policy(t.policy) " + every + " limit 1")
			_, err := db.Pool.Exec(context.Background(), "select ratelimit_drop_policy(t.policy) "+every)
			require.Equal(t, "RL001", sqlState(err), "%v", err)
		})
	}
}

// inMode queries by one protocol.
type inMode struct {
	conn *pgx.Conn
	mode pgx.QueryExecMode
}

func (q inMode) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.conn.QueryRow(ctx, sql, append([]any{q.mode}, args...)...)
}

func repeat(value string, n int) []string { return slices.Repeat([]string{value}, n) }
