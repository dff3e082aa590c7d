package tests

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func enforce(q querier, policy, key string, cost int64, idempotencyKey ...string) (decision, error) {
	r := requestOf(policy, key, cost, idempotencyKey...)
	return decide(q, "ratelimit_enforce($1, $2, $3, $4)", r.Policy, r.Key, r.Cost, r.IdempotencyKey)
}

func TestEnforce_IsAcquireThatRaises(t *testing.T) {
	onDBs(t, map[string][]policyOption{"durable": {durable}, "ephemeral": {ephemeral}, "stepped": {stepped}}, func(t *testing.T, db *testDB, options []policyOption) {
		db.policy("enforced", 10, 3, 7*second, options...).policy("acquired", 10, 3, 7*second, options...)
		db.exec("select ratelimit_override(p, 'special', 4) from unnest('{enforced,acquired}'::text[]) as p")
		refusals := 0
		for i, cost := range []int64{4, 0, 5, 2, 11, 1, 1, 3, 0, 10, 4, 1} {
			db.setClock(t0.Add(time.Duration(i) * 1_100 * ms))
			for _, key := range []string{"k", "special"} {
				var idempotencyKey []string
				if i%3 == 0 {
					idempotencyKey = []string{fmt.Sprint(i / 6)}
				}
				want, wantErr := acquire(db.Pool, "acquired", key, cost, idempotencyKey...)
				got, err := enforce(db.Pool, "enforced", key, cost, idempotencyKey...)
				switch {
				case wantErr != nil:
					require.Equal(t, sqlState(wantErr), sqlState(err))
				case want.Allowed:
					require.NoError(t, err)
					require.Equal(t, want, got)
				default:
					refusals++
					requireDenial(t, err, "enforced", cost, want)
					require.Equal(t, db.bucket("acquired", key), db.bucket("enforced", key))
				}
			}
		}
		require.Greater(t, refusals, 4)
		for _, call := range []string{"('none', 'k')", "('enforced', '')", "('enforced', null)", "('enforced', 'k', -1)", "('enforced', 'k', null)", "(null, 'k')"} {
			_, err := db.Pool.Exec(t.Context(), "select ratelimit_acquire"+call)
			want := pgError(err)
			got := db.refused(want.Code, "select ratelimit_enforce"+call)
			require.Equal(t, []string{want.Message, want.Detail}, []string{got.Message, got.Detail})
		}
		db.exec("select ratelimit_define_policy('enforced', shadow => true)")
		d, err := enforce(db.Pool, "enforced", "k", 11)
		require.NoError(t, err)
		require.True(t, d.Shadowed)
	})
}

// requireDenial fails unless an error is RL429 with the numbers of a denial, and without the key.
func requireDenial(t *testing.T, err error, policy string, cost int64, want decision) {
	t.Helper()
	e := pgError(err)
	require.NotNil(t, e, "%v", err)
	require.Equal(t, "RL429", e.Code, "%v", err)
	require.Equal(t, "rate limit exceeded", e.Message)
	require.NotEmpty(t, e.Hint)
	d, ok := client.Denied(err)
	require.True(t, ok, e.Detail)
	require.Equal(t, policy, d.Policy)
	require.Equal(t, cost, d.Cost)
	got := decision{Remaining: d.Remaining, RetryAfter: micros(d.RetryAfter), ResetAfter: want.ResetAfter, Capacity: d.Capacity}
	if d.Never() {
		got.RetryAfter = model.Never
	}
	require.Equal(t, want, got, e.Detail)
}

func TestEnforce_TellsWhenAndNeverWhose(t *testing.T) {
	db := parallelDB(t, t0).policy("p", 10, 1, 7*second).policy("budget", 5, 0, second)
	db.exec("select ratelimit_acquire(p, 'secret', 5) from unnest('{p,budget}'::text[]) as p")
	for call, want := range map[string][2]string{
		"('p', 'secret', 6)":      {`{"policy": "p", "cost": 6, "remaining": 5, "retry_after": 7, "capacity": 10}`, "Try again in 7 seconds."},
		"('p', 'secret', 11)":     {`{"policy": "p", "cost": 11, "remaining": 5, "retry_after": null, "capacity": 10}`, "A cost of 11 never fits a bucket of 10."},
		"('budget', 'secret', 1)": {`{"policy": "budget", "cost": 1, "remaining": 0, "retry_after": null, "capacity": 5}`, "The bucket does not refill by itself."},
	} {
		e := db.refused("RL429", "select ratelimit_enforce"+call)
		require.Equal(t, want, [2]string{e.Detail, e.Hint})
		require.NotContains(t, e.Message+e.Detail+e.Hint+e.Where, "secret")
	}
	db.setClock(t0.Add(3_500*ms + us))
	_, err := enforce(db.Pool, "p", "secret", 6)
	require.Contains(t, pgError(err).Detail, `"retry_after": 3.499999,`)
}

// guarded creates a table with a guard that counts rows, and one whose rows have costs.
func (db *testDB) guarded(policy, table string) {
	db.t.Helper()
	db.exec(fmt.Sprintf(`
		create table %[2]s (customer text, size integer, note text);
		create trigger limited after insert on %[2]s referencing new table as inserted for each statement execute function ratelimit_guard('%[1]s', 'customer');
		create table %[2]s_of_sizes (like %[2]s);
		create trigger limited after insert on %[2]s_of_sizes referencing new table as inserted for each statement execute function ratelimit_guard('%[1]s', 'customer', 'size')`,
		policy, table), pgx.QueryExecModeSimpleProtocol)
}

func TestGuard_ChargesEachKeyOnce(t *testing.T) {
	onDBs(t, map[string]policyOption{"durable": durable, "ephemeral": ephemeral}, func(t *testing.T, db *testDB, durability policyOption) {
		db.at(t0).policy("p", 10, 1, second, durability)
		db.guarded("p", "orders")
		left := func(want ...int64) {
			t.Helper()
			require.Equal(t, want, []int64{db.left("p", "a"), db.left("p", "b"), db.left("p", "c")})
		}
		refused := func(code, sql string) {
			t.Helper()
			before := state(t, db.Pool)
			db.refused(code, sql)
			require.Equal(t, before, state(t, db.Pool), sql)
		}
		db.exec("insert into orders (customer) values ('a')")
		left(9, 10, 10)
		db.exec("insert into orders (customer) values ('a'), ('b'), ('a')")
		left(7, 9, 10)
		db.exec("insert into orders (customer) select 'a' where false")
		left(7, 9, 10)
		db.exec("insert into orders_of_sizes values ('a', 2), ('c', 4), ('a', 0), ('b', 0)")
		left(5, 9, 6)
		require.EqualValues(t, 8, db.number("select (select count(*) from orders) + (select count(*) from orders_of_sizes)"))
		refused("RL429", "insert into orders (customer) select 'a' from generate_series(1, 6)")
		refused("RL429", "insert into orders_of_sizes values ('a', 5), ('b', 9), ('c', 7), ('new', 1)")
		left(5, 9, 6)
		_, err := db.Pool.Exec(t.Context(), "insert into orders_of_sizes values ('a', 7), ('b', 9), ('c', 9), ('new', 10)")
		requireDenial(t, err, "p", 9, denied(6, 3*second, 4*second, 10)) // the longest wait
		_, err = db.Pool.Exec(t.Context(), "insert into orders_of_sizes values ('a', 7), ('c', 99), ('c', 1)")
		requireDenial(t, err, "p", 100, never(6, 4*second, 10))
		refused("22023", "insert into orders (customer) values ('a'), (null)")
		refused("22023", "insert into orders (customer) values (null)")
		refused("22023", "insert into orders_of_sizes values ('a', 1), (null, 0)")
		refused("22023", "insert into orders (customer) values ('a'), ('')")
		refused("22023", "insert into orders (customer) values (repeat('x', 513))")
		refused("22023", "insert into orders_of_sizes values ('a', 3), ('a', -1)")
		refused("22023", "insert into orders_of_sizes values ('a', 3), ('a', null)")
		refused("RL429", "insert into orders_of_sizes select 'a', 2147483647 from generate_series(1, 100)")
		db.exec("select ratelimit_define_policy('p', shadow => true)")
		db.exec("insert into orders (customer) select 'a' from generate_series(1, 20)")
		db.exec("insert into orders (customer) select c from generate_series(1, 7), unnest('{a,b,c}'::text[]) as c")
		left(5, 2, 6) // what fits moves as if it were enforced
		db.dropPolicy("p")
		refused("RL001", "insert into orders (customer) values ('a')")
		refused("RL001", "insert into orders (customer) values ('a'), ('b')")
		db.exec("insert into orders (customer) select 'a' where false")
	})
}

// COPY counts; an upsert's updated rows, UPDATE and DELETE do not; MERGE and RETURNING change nothing.
func TestGuard_CountsWhatIsInserted(t *testing.T) {
	ctx := t.Context()
	db := parallelDB(t).policy("p", 100, 1, aDay)
	db.guarded("p", "orders")
	db.exec("create unique index on orders (customer, size)")
	_, err := db.Pool.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"customer", "size"}, pgx.CopyFromRows([][]any{{"copied", 1}, {"copied", 2}, {"also", 1}}))
	require.NoError(t, err)
	require.Equal(t, []int64{98, 99}, []int64{db.left("p", "copied"), db.left("p", "also")})
	for _, sql := range []string{
		"insert into orders values ('copied', 1), ('copied', 3), ('also', 1) on conflict (customer, size) do update set note = 'again'",
		"insert into orders values ('copied', 1), ('also', 1) on conflict do nothing",
		"update orders set note = 'x'",
		"merge into orders as o using (values ('also', 2), ('copied', 1)) as v (customer, size) on o.customer = v.customer and o.size = v.size " +
			"when matched then update set note = 'm' when not matched then insert (customer, size) values (v.customer, v.size)",
		"with inserted as (insert into orders values ('also', 3) returning customer) select * from inserted",
		"delete from orders where customer = 'copied'",
	} {
		db.exec(sql)
	}
	require.Equal(t, []int64{97, 97}, []int64{db.left("p", "copied"), db.left("p", "also")})
	_, err = db.Pool.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"customer", "size"}, pgx.CopyFromSlice(98, func(i int) ([]any, error) { return []any{"copied", i}, nil }))
	require.Equal(t, "RL429", sqlState(err), "%v", err)
	require.Zero(t, db.number("select count(*) from orders where customer = 'copied'"))
}

func TestGuard_KeyColumns(t *testing.T) {
	db := parallelDB(t).policy("p", 100, 1, aDay)
	for typ, key := range map[string]string{
		"text": "some text", "varchar(40)": "varying", "uuid": "8c1b7ad0-6c2f-4f5e-9d57-1e5d6b0f4d11", "integer": "-7", "bigint": "9000000000000",
	} {
		table := pgx.Identifier{`of "` + typ + `"; --`}.Sanitize()
		db.exec("create table " + table + ` (id serial, "the ""key""" ` + typ + `, cost bigint)`)
		db.exec("create trigger limited after insert on " + table + ` referencing new table as inserted for each statement
			execute function ratelimit_guard('p', 'the "key"', 'cost')`)
		db.exec("insert into "+table+` ("the ""key""", cost) select $1::text::`+typ+`, 3 from generate_series(1, 2)`, key)
		require.EqualValues(t, 94, db.left("p", key), typ)
	}
	// Keys that a collation takes for equal are two buckets.
	if db.number("select count(*) from pg_collation where collprovider = 'i'") > 0 {
		db.exec(`
			create collation blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
			create table blind (customer text collate blind);
			create trigger limited after insert on blind referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer');
			insert into blind values ('A'), ('a'), ('a')`, pgx.QueryExecModeSimpleProtocol)
		require.Equal(t, []int64{99, 98}, []int64{db.left("p", "A"), db.left("p", "a")})
	}
	// A column that is computed when the row is stored.
	db.exec(`
		create table computed (customer text, hashed text generated always as (md5(customer)) stored);
		create trigger limited after insert on computed referencing new table as inserted for each statement execute function ratelimit_guard('p', 'hashed');
		insert into computed values ('a')`, pgx.QueryExecModeSimpleProtocol)
	require.EqualValues(t, 99, db.left("p", "0cc175b9c0f1b6a831c399e269772661"))
}

// A guard stands on the table that the statement names.
func TestGuard_PartitionsParentsAndForeignTables(t *testing.T) {
	db := parallelDB(t).policy("p", 100, 1, aDay)
	const guard = "referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer')"
	db.exec(`
		create table parted (customer text, n integer) partition by range (n);
		create table parted_low partition of parted for values from (0) to (10);
		create table parted_high partition of parted for values from (10) to (20);
		create trigger limited after insert on parted `+guard+`;
		create table parent (customer text);
		create table child () inherits (parent);
		create trigger limited after insert on parent `+guard, pgx.QueryExecModeSimpleProtocol)
	db.exec("insert into parted values ('a', 1), ('a', 11), ('b', 12)")
	require.Equal(t, []int64{98, 99}, []int64{db.left("p", "a"), db.left("p", "b")})
	db.exec("insert into parted_low values ('a', 2)") // a partition that is named is not guarded by the guard of its table
	require.EqualValues(t, 98, db.left("p", "a"))
	db.exec("create trigger limited after insert on parted_low " + guard)
	db.exec("insert into parted_low values ('a', 3)")
	require.EqualValues(t, 97, db.left("p", "a"))
	db.exec("insert into parted values ('a', 4)") // once, and not again by the partition's guard
	require.EqualValues(t, 96, db.left("p", "a"))
	db.exec("insert into parent values ('a')")
	require.EqualValues(t, 95, db.left("p", "a"))
	db.exec("insert into child values ('a')")
	require.EqualValues(t, 95, db.left("p", "a"))
	db.exec("create foreign data wrapper nothing; create server nowhere foreign data wrapper nothing; create foreign table far (customer text) server nowhere", pgx.QueryExecModeSimpleProtocol)
	_, err := db.Pool.Exec(t.Context(), "create trigger limited after insert on far "+guard)
	require.ErrorContains(t, err, "foreign table")
	db.exec("create view seen as select * from parent")
	_, err = db.Pool.Exec(t.Context(), "create trigger limited after insert on seen "+guard)
	require.ErrorContains(t, err, "view")
}

// Of a partitioned table with a foreign partition, what goes to the others is charged. PostgreSQL refuses what would go to
// the foreign one, because it has no transition table for that; older releases of it have, and there it is charged.
func TestGuard_ForeignPartitions(t *testing.T) {
	db := parallelDB(t)
	if pgtest.Shared(t).Rung == "url" || db.number("select count(*) from pg_available_extensions where name = 'postgres_fdw'") == 0 {
		t.Skip("a foreign partition takes postgres_fdw, and a server that lets itself in")
	}
	version := db.number("select current_setting('server_version_num')::bigint")
	refused := version >= map[int64]int64{15: 150014, 16: 160010, 17: 170006}[version/10000]
	db.definePolicy("p", 100, 1, aDay)
	db.exec(`
		create extension postgres_fdw;
		do $$
		begin
		  execute format('create server here foreign data wrapper postgres_fdw options (host %L, port %L, dbname %L)',
		                 split_part(current_setting('unix_socket_directories'), ',', 1), current_setting('port'), current_database());
		  execute format('create user mapping for current_user server here options (user %L, password_required %L)', current_user, 'false');
		end $$;
		create table elsewhere (customer text, n integer);
		create table parted (customer text, n integer) partition by range (n);
		create table parted_low partition of parted for values from (0) to (10);
		create foreign table parted_high partition of parted for values from (10) to (20) server here options (table_name 'elsewhere');
		create trigger limited after insert on parted referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer')`,
		pgx.QueryExecModeSimpleProtocol)
	insert := func(rows string) error { return failure(db.Pool.Exec(t.Context(), "insert into parted values "+rows)) }
	uncharged := func() int64 { return db.number("select count(*) from parted") - (100 - db.left("p", "a")) }
	require.NoError(t, insert("('a', 1), ('a', 2)"))
	require.EqualValues(t, 98, db.left("p", "a"))
	for _, rows := range []string{"('a', 11)", "('a', 3), ('a', 12), ('a', 4)"} {
		err := insert(rows)
		if refused {
			require.Equal(t, "0A000", sqlState(err), "%v", err)
			require.ErrorContains(t, err, "child foreign tables")
		} else {
			require.NoError(t, err)
		}
		require.Zero(t, uncharged())
	}
	_, err := db.Pool.CopyFrom(t.Context(), pgx.Identifier{"parted"}, []string{"customer", "n"}, pgx.CopyFromRows([][]any{{"a", 5}, {"a", 13}}))
	require.Equal(t, refused, err != nil, "%v", err)
	require.Zero(t, uncharged())
	require.NoError(t, insert("('a', 6)"), "the others go on")
	require.Zero(t, uncharged())
	// Its name, like that of any partition, passes by the guard of the table.
	db.exec("insert into parted_high values ('a', 14)")
	require.EqualValues(t, 1, uncharged())
}

// Any number of keys, in the one order of locks: statements with the same keys the other way round wait for each other, and do not deadlock.
func TestGuard_ManyKeys(t *testing.T) {
	t.Parallel()
	db := newCrowdDB(t, 8).policy("p", 1_000_000, 1, aDay)
	db.guarded("p", "orders")
	const keys, rounds = 3000, 4
	crowd(t, 8, func(caller int) error {
		for round := range rounds {
			order := "asc"
			if (caller+round)%2 == 0 {
				order = "desc"
			}
			if _, err := db.Pool.Exec(context.Background(), "insert into orders (customer) select n::text from generate_series(1, $1::integer) as n order by n "+order, keys); err != nil {
				return err
			}
		}
		return nil
	})
	require.EqualValues(t, keys, db.number("select count(*) from ratelimit_status('p', 1000000) where remaining = 1000000 - $1", 8*rounds))
	db.exec("select ratelimit_override('p', '2999', capacity => 0)")
	before := db.number("select sum(level) from ratelimit.buckets")
	db.refused("RL429", "insert into orders (customer) select n::text from generate_series(1, $1::integer) as n", keys)
	require.Equal(t, before, db.number("select sum(level) from ratelimit.buckets"))
}

// guardedBulk has two tables alike, of which one is guarded, and inserts 100,000 rows for 1,000 keys into one.
func guardedBulk(db *testDB) (s *session, insert func(table string)) {
	db.definePolicy("p", 9_000_000_000_000, 0, second)
	db.exec(`
		create table plain (id bigserial primary key, customer text not null, note text, at timestamptz not null default now());
		create table guarded (like plain including all);
		create trigger limited after insert on guarded referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer')`,
		pgx.QueryExecModeSimpleProtocol)
	s = db.session()
	insert = func(table string) {
		s.exec("insert into " + table + " (customer, note) select 'user:' || n % 1000, 'as long as a note is' from generate_series(1, 100000) as n")
	}
	insert("guarded")
	return s, insert
}

func TestGuard_WritesEachBucketOnceForAStatement(t *testing.T) {
	db := parallelDB(t)
	s, insert := guardedBulk(db)
	s.exec("begin")
	insert("guarded")
	var updated int64
	require.NoError(t, s.QueryRow(t.Context(), "select pg_stat_get_xact_tuples_updated('ratelimit.buckets'::regclass)").Scan(&updated))
	require.EqualValues(t, 1000, updated)
	s.exec("commit")
	require.EqualValues(t, 1000, db.number("select count(*) from ratelimit.buckets where level = (9000000000000 - 2 * 100) * 1000000"))
}

// What a statement with a guard costs, to one without:
//
//	go test ./tests -run '^$' -bench Guard
func BenchmarkGuard_ToAPlainInsert(b *testing.B) {
	_, insert := guardedBulk(newDB(b))
	fastest := map[string]time.Duration{"plain": time.Hour, "guarded": time.Hour}
	for b.Loop() {
		for table := range fastest {
			began := time.Now()
			insert(table)
			fastest[table] = min(fastest[table], time.Since(began))
		}
	}
	b.ReportMetric(fastest["guarded"].Seconds()/fastest["plain"].Seconds(), "of-plain")
}

func TestGuard_GivesBackWhatFails(t *testing.T) {
	db := parallelDB(t).policy("p", 10, 1, aDay)
	db.guarded("p", "orders")
	db.exec("alter table orders add constraint positive check (size > 0)")
	db.refused("23514", "insert into orders values ('a', 1), ('a', -1)")
	require.EqualValues(t, 10, db.left("p", "a"))
	tx := db.begin().run("insert into orders values ('a', 1)").run("savepoint s").run("insert into orders values ('a', 1), ('b', 1)")
	tx.exec("rollback to s")
	waiter := db.session().startAcquire("p", "a", 9).blockedBy(tx)
	tx.exec("commit")
	require.True(t, waiter.answer().Allowed)
	require.Equal(t, []int64{0, 10}, []int64{db.left("p", "a"), db.left("p", "b")})
	db.refused("RL429", "insert into orders values ('a', 1)")
}
