package spend

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// requireDenial fails unless an error is RL429 with the numbers of a denial, and without the key.
func requireDenial(t *testing.T, err error, policy string, cost int64, want kit.Decision) {
	e := kit.PgError(err)
	require.NotNil(t, e, "%v", err)
	require.Equal(t, "RL429", e.Code, "%v", err)
	require.Equal(t, "rate limit exceeded", e.Message)
	require.NotEmpty(t, e.Hint)
	d, ok := client.AsDenial(err)
	require.True(t, ok, e.Detail)
	require.Equal(t, policy, d.Policy)
	require.Equal(t, cost, d.Cost)
	got := kit.Decision{Remaining: d.Remaining, RetryAfter: kit.Micros(d.RetryAfter), ResetAfter: want.ResetAfter, Capacity: d.Capacity}
	if d.Never() {
		got.RetryAfter = model.Never
	}
	require.Equal(t, want, got, e.Detail)
}

func TestEnforce_TellsWhenAndNeverWhose(t *testing.T) {
	db := kit.ParallelDB(t, kit.T0).Policy("p", 10, 1, 7*kit.Second).Policy("budget", 5, 0, kit.Second)
	db.Execute("select ratelimit_acquire(p, 'secret', 5) from unnest('{p,budget}'::text[]) as p")
	for call, want := range map[string][2]string{
		"('p', 'secret', 6)":      {`{"policy": "p", "cost": 6, "remaining": 5, "retry_after": 7, "capacity": 10}`, "Try again in 7 seconds."},
		"('p', 'secret', 11)":     {`{"policy": "p", "cost": 11, "remaining": 5, "retry_after": null, "capacity": 10}`, "A cost of 11 never fits a bucket of 10."},
		"('budget', 'secret', 1)": {`{"policy": "budget", "cost": 1, "remaining": 0, "retry_after": null, "capacity": 5}`, "The bucket will not hold so many tokens by itself."},
	} {
		e := db.Refused("RL429", "select ratelimit_enforce"+call)
		require.Equal(t, want, [2]string{e.Detail, e.Hint})
		require.NotContains(t, e.Message+e.Detail+e.Hint+e.Where, "secret")
	}
	db.SetClock(kit.T0.Add(3_500*kit.Ms + kit.Us))
	require.Contains(t, db.Refused("RL429", "select ratelimit_enforce('p', 'secret', 6)").Detail, `"retry_after": 3.499999,`)
}

func TestGuard_ChargesEachKeyOnce(t *testing.T) {
	kit.OnDBs(t, map[string]kit.PolicyOption{"durable": kit.Durable, "ephemeral": kit.Ephemeral}, func(t *testing.T, db *kit.TestDB, durability kit.PolicyOption) {
		db.At(kit.T0).Policy("p", 10, 1, kit.Second, durability)
		db.Guarded("p", "orders")
		left := func(want ...int64) {
			require.Equal(t, want, []int64{db.Left("p", "a"), db.Left("p", "b"), db.Left("p", "c")})
		}
		refused := func(code, sql string) {
			before := kit.State(t, db.Pool)
			_ = db.Refused(code, sql)
			require.Equal(t, before, kit.State(t, db.Pool), sql)
		}
		db.Execute("insert into orders (customer) values ('a')")
		left(9, 10, 10)
		db.Execute("insert into orders (customer) values ('a'), ('b'), ('a')")
		left(7, 9, 10)
		db.Execute("insert into orders (customer) select 'a' where false")
		left(7, 9, 10)
		db.Execute("insert into orders_of_sizes values ('a', 2), ('c', 4), ('a', 0), ('b', 0)")
		left(5, 9, 6)
		require.EqualValues(t, 8, db.Number("select (select count(*) from orders) + (select count(*) from orders_of_sizes)"))
		refused("RL429", "insert into orders (customer) select 'a' from generate_series(1, 6)")
		refused("RL429", "insert into orders_of_sizes values ('a', 5), ('b', 9), ('c', 7), ('new', 1)")
		left(5, 9, 6)
		_, err := db.Pool.Exec(t.Context(), "insert into orders_of_sizes values ('a', 7), ('b', 9), ('c', 9), ('new', 10)")
		requireDenial(t, err, "p", 9, kit.Denied(6, 3*kit.Second, 4*kit.Second, 10)) // the longest wait
		_, err = db.Pool.Exec(t.Context(), "insert into orders_of_sizes values ('a', 7), ('c', 99), ('c', 1)")
		requireDenial(t, err, "p", 100, kit.Never(6, 4*kit.Second, 10))
		refused("22023", "insert into orders (customer) values ('a'), (null)")
		refused("22023", "insert into orders (customer) values (null)")
		refused("22023", "insert into orders_of_sizes values ('a', 1), (null, 0)")
		refused("22023", "insert into orders (customer) values ('a'), ('')")
		refused("22023", "insert into orders (customer) values (repeat('x', 513))")
		refused("22023", "insert into orders_of_sizes values ('a', 3), ('a', -1)")
		refused("22023", "insert into orders_of_sizes values ('a', 3), ('a', null)")
		refused("RL429", "insert into orders_of_sizes select 'a', 2147483647 from generate_series(1, 100)")
		db.Execute("select ratelimit_define_policy('p', shadow => true)")
		db.Execute("insert into orders (customer) select 'a' from generate_series(1, 20)")
		db.Execute("insert into orders (customer) select c from generate_series(1, 7), unnest('{a,b,c}'::text[]) as c")
		left(5, 2, 6) // what fits moves as if it were enforced
		db.DropPolicy("p")
		refused("RL001", "insert into orders (customer) values ('a')")
		refused("RL001", "insert into orders (customer) values ('a'), ('b')")
		db.Execute("insert into orders (customer) select 'a' where false")
	})
}

// COPY counts; an upsert's updated rows, UPDATE and DELETE do not; MERGE and RETURNING change nothing.
func TestGuard_CountsWhatIsInserted(t *testing.T) {
	ctx := t.Context()
	db := kit.ParallelDB(t).Policy("p", 100, 1, kit.ADay)
	db.Guarded("p", "orders")
	db.Execute("create unique index on orders (customer, size)")
	_, err := db.Pool.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"customer", "size"}, pgx.CopyFromRows([][]any{{"copied", 1}, {"copied", 2}, {"also", 1}}))
	require.NoError(t, err)
	require.Equal(t, []int64{98, 99}, []int64{db.Left("p", "copied"), db.Left("p", "also")})
	for _, sql := range []string{
		"insert into orders values ('copied', 1), ('copied', 3), ('also', 1) on conflict (customer, size) do update set note = 'again'",
		"insert into orders values ('copied', 1), ('also', 1) on conflict do nothing",
		"update orders set note = 'x'",
		"merge into orders as o using (values ('also', 2), ('copied', 1)) as v (customer, size) on o.customer = v.customer and o.size = v.size " +
			"when matched then update set note = 'm' when not matched then insert (customer, size) values (v.customer, v.size)",
		"with inserted as (insert into orders values ('also', 3) returning customer) select * from inserted",
		"delete from orders where customer = 'copied'",
	} {
		db.Execute(sql)
	}
	require.Equal(t, []int64{97, 97}, []int64{db.Left("p", "copied"), db.Left("p", "also")})
	_, err = db.Pool.CopyFrom(ctx, pgx.Identifier{"orders"}, []string{"customer", "size"}, pgx.CopyFromSlice(98, func(i int) ([]any, error) { return []any{"copied", i}, nil }))
	require.Equal(t, "RL429", kit.SQLState(err), "%v", err)
	require.Zero(t, db.Number("select count(*) from orders where customer = 'copied'"))
}

func TestGuard_KeysOfAnyType(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 100, 1, kit.ADay)
	for typ, key := range map[string]string{
		"text": "some text", "varchar(40)": "varying", "uuid": "8c1b7ad0-6c2f-4f5e-9d57-1e5d6b0f4d11", "integer": "-7", "bigint": "9000000000000",
	} {
		table := pgx.Identifier{`of "` + typ + `"; --`}.Sanitize()
		db.Execute("create table " + table + ` (id serial, "the ""key""" ` + typ + `, cost bigint)`)
		db.Execute("create trigger limited after insert on " + table + ` referencing new table as inserted for each statement
			execute function ratelimit_guard('p', 'the "key"', 'cost')`)
		db.Execute("insert into "+table+` ("the ""key""", cost) select $1::text::`+typ+`, 3 from generate_series(1, 2)`, key)
		require.EqualValues(t, 94, db.Left("p", key), typ)
	}
	// Keys that a collation takes for equal are two buckets.
	if db.Number("select count(*) from pg_collation where collprovider = 'i'") > 0 {
		db.Execute(`
			create collation blind (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
			create table blind (customer text collate blind);
			create trigger limited after insert on blind referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer');
			insert into blind values ('A'), ('a'), ('a')`, pgx.QueryExecModeSimpleProtocol)
		require.Equal(t, []int64{99, 98}, []int64{db.Left("p", "A"), db.Left("p", "a")})
	}
	// A column that is computed when the row is stored.
	db.Execute(`
		create table computed (customer text, hashed text generated always as (md5(customer)) stored);
		create trigger limited after insert on computed referencing new table as inserted for each statement execute function ratelimit_guard('p', 'hashed');
		insert into computed values ('a')`, pgx.QueryExecModeSimpleProtocol)
	require.EqualValues(t, 99, db.Left("p", "0cc175b9c0f1b6a831c399e269772661"))
}

// A guard stands on the table that the statement names.
func TestGuard_PartitionsParentsAndForeignTables(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 100, 1, kit.ADay)
	const guard = "referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer')"
	db.Execute(`
		create table parted (customer text, n integer) partition by range (n);
		create table parted_low partition of parted for values from (0) to (10);
		create table parted_high partition of parted for values from (10) to (20);
		create trigger limited after insert on parted `+guard+`;
		create table parent (customer text);
		create table child () inherits (parent);
		create trigger limited after insert on parent `+guard, pgx.QueryExecModeSimpleProtocol)
	db.Execute("insert into parted values ('a', 1), ('a', 11), ('b', 12)")
	require.Equal(t, []int64{98, 99}, []int64{db.Left("p", "a"), db.Left("p", "b")})
	db.Execute("insert into parted_low values ('a', 2)") // a partition that is named is not guarded by the guard of its table
	require.EqualValues(t, 98, db.Left("p", "a"))
	db.Execute("create trigger limited after insert on parted_low " + guard)
	db.Execute("insert into parted_low values ('a', 3)")
	require.EqualValues(t, 97, db.Left("p", "a"))
	db.Execute("insert into parted values ('a', 4)") // once, and not again by the partition's guard
	require.EqualValues(t, 96, db.Left("p", "a"))
	db.Execute("insert into parent values ('a')")
	require.EqualValues(t, 95, db.Left("p", "a"))
	db.Execute("insert into child values ('a')")
	require.EqualValues(t, 95, db.Left("p", "a"))
	db.Execute("create foreign data wrapper nothing; create server nowhere foreign data wrapper nothing; create foreign table far (customer text) server nowhere", pgx.QueryExecModeSimpleProtocol)
	_, err := db.Pool.Exec(t.Context(), "create trigger limited after insert on far "+guard)
	require.ErrorContains(t, err, "foreign table")
	db.Execute("create view seen as select * from parent")
	_, err = db.Pool.Exec(t.Context(), "create trigger limited after insert on seen "+guard)
	require.ErrorContains(t, err, "view")
}

// Of a partitioned table with a foreign partition, what goes to the others is charged. PostgreSQL refuses what would go to
// the foreign one, because it has no transition table for that; older releases of it have, and there it is charged.
func TestGuard_ForeignPartitions(t *testing.T) {
	db := kit.ParallelDB(t)
	if pgtest.Shared(t).Rung == "url" || db.Number("select count(*) from pg_available_extensions where name = 'postgres_fdw'") == 0 {
		t.Skip("a foreign partition takes postgres_fdw, and a server that lets itself in")
	}
	version := db.Number("select current_setting('server_version_num')::bigint")
	refused := version >= map[int64]int64{15: 150014, 16: 160010, 17: 170006}[version/10000]
	db.DefinePolicy("p", 100, 1, kit.ADay)
	db.Execute(`
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
	insert := func(rows string) error {
		return kit.ErrorOf(db.Pool.Exec(t.Context(), "insert into parted values "+rows))
	}
	uncharged := func() int64 { return db.Number("select count(*) from parted") - (100 - db.Left("p", "a")) }
	require.NoError(t, insert("('a', 1), ('a', 2)"))
	require.EqualValues(t, 98, db.Left("p", "a"))
	for _, rows := range []string{"('a', 11)", "('a', 3), ('a', 12), ('a', 4)"} {
		err := insert(rows)
		if refused {
			require.Equal(t, "0A000", kit.SQLState(err), "%v", err)
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
	db.Execute("insert into parted_high values ('a', 14)")
	require.EqualValues(t, 1, uncharged())
}

// Any number of keys, in the one order of locks: statements with the same keys the other way round wait for each other, and do not deadlock.
func TestGuard_ManyKeysInAnyOrderAreCountedExactly(t *testing.T) {
	t.Parallel()
	db := kit.NewCrowdDB(t, 8).Policy("p", 1_000_000, 1, kit.ADay)
	db.Guarded("p", "orders")
	const keys, rounds = 3000, 4
	kit.Crowd(t, 8, func(caller int) error {
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
	require.EqualValues(t, keys, db.Number("select count(*) from ratelimit_status('p', 1000000) where remaining = 1000000 - $1", 8*rounds))
	db.Execute("select ratelimit_override('p', '2999', capacity => 0)")
	before := db.Number("select sum(level) from ratelimit.buckets")
	_ = db.Refused("RL429", "insert into orders (customer) select n::text from generate_series(1, $1::integer) as n", keys)
	require.Equal(t, before, db.Number("select sum(level) from ratelimit.buckets"))
}

func TestGuard_WritesEachBucketOnceForAStatement(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 9_000_000_000_000, 0, kit.Second)
	db.Guarded("p", "orders")
	const insert = "insert into orders (customer) select 'user:' || n % 1000 from generate_series(1, 100000) as n"
	s := db.Session().Execute(insert).Execute("begin").Execute(insert)
	require.EqualValues(t, 1000, kit.One[int64](t, s, "select pg_stat_get_xact_tuples_updated('ratelimit.buckets'::regclass)"))
	s.Execute("commit")
	require.EqualValues(t, 1000, db.Number("select count(*) from ratelimit.buckets where level = (9000000000000 - 2 * 100) * 1000000"))
}

func TestGuard_GivesBackWhatFails(t *testing.T) {
	db := kit.ParallelDB(t).Policy("p", 10, 1, kit.ADay)
	db.Guarded("p", "orders")
	db.Execute("alter table orders add constraint positive check (size > 0)")
	_ = db.Refused("23514", "insert into orders values ('a', 1), ('a', -1)")
	require.EqualValues(t, 10, db.Left("p", "a"))
	tx := db.Begin().Execute("insert into orders values ('a', 1)").Execute("savepoint s").Execute("insert into orders values ('a', 1), ('b', 1)")
	tx.Execute("rollback to s")
	waiter := db.Session().StartAcquire("p", "a", 9).BlockedBy(tx)
	tx.Execute("commit")
	require.True(t, waiter.Answer().Allowed)
	require.Equal(t, []int64{0, 10}, []int64{db.Left("p", "a"), db.Left("p", "b")})
	_ = db.Refused("RL429", "insert into orders values ('a', 1)")
}

// A guard runs with the rights of the package's owner, here a superuser, on tables and in sessions of a plain role. Each
// attack has code of that role where the guard would read. All are refused before a row is read.
func TestSecurity_GuardReadsNothingHostile(t *testing.T) {
	const guard = "execute function ratelimit_guard('p', 'customer')"
	const trigger = "create trigger limited after insert on orders referencing new table as inserted for each statement "
	type testCase struct{ prepare, insert, detail string }
	kit.InParallel(t, map[string]testCase{
		"no transition table, and a temporary view of its name": {`
			create temporary view inserted as select spy() as customer;
			create trigger limited after insert on orders for each statement ` + guard,
			"", "not one after insert for each statement"},
		"another transition table, and a temporary table of its name": {`
			create temporary table inserted (customer text);
			create trigger limited after insert on orders referencing new table as others for each statement ` + guard,
			"", "not one after insert for each statement"},
		"a trigger that is renamed to one that is right": {`
			create temporary view inserted as select spy() as customer;
			create function rename() returns trigger language plpgsql as $$
			begin
			  alter trigger limited on orders rename to was_limited;
			  alter trigger right_one on orders rename to limited;
			  return null;
			end $$;
			create trigger a after insert on orders for each statement execute function rename();
			create trigger limited after insert on orders for each statement ` + guard + `;
			create trigger right_one after insert on orders referencing new table as inserted for each statement ` + guard,
			"", "has a temporary relation called inserted"},
		"before insert":     {"create trigger limited before insert on orders for each statement " + guard, "", "not one after insert"},
		"a row":             {"create trigger limited after insert on orders for each row " + guard, "", "not one after insert"},
		"a row, with table": {"create trigger limited after insert on orders referencing new table as inserted for each row " + guard, "", "not one after insert"},
		"after update": {"create trigger limited after update on orders referencing new table as inserted for each statement " + guard,
			"update orders set size = 1", "not one after insert"},
		"after delete": {"create trigger limited after delete on orders referencing old table as inserted for each statement " + guard,
			"delete from orders", "not one after insert"},
		"after truncate": {"create trigger limited after truncate on orders for each statement " + guard, "truncate orders", "not one after insert"},
		"a domain": {`
			create domain spied as text check (spy() is not null);
			alter table orders alter customer type spied;` + trigger + guard, "", "has no column customer of a type"},
		"an enum with a cast": {`
			create type colour as enum ('red');
			create function shown(colour) returns text language sql as 'select spy()';
			create cast (colour as text) with function shown(colour) as implicit;
			alter table orders drop customer, add customer colour;` + trigger + guard, "insert into orders (customer) values ('red')", "has no column customer of a type"},
		"a composite type with a cast": {`
			create type pair as (a integer, b integer);
			create function shown(pair) returns text language sql as 'select spy()';
			create cast (pair as text) with function shown(pair) as implicit;
			alter table orders drop customer, add customer pair;` + trigger + guard, "insert into orders (customer) values ('(1,2)')", "has no column customer of a type"},
		"a domain of costs": {`
			create domain spied as integer check (spy() is not null);
			alter table orders alter size type spied;` + trigger + "execute function ratelimit_guard('p', 'customer', 'size')", "", "has no column size of a type"},
		"costs that are text":     {trigger + "execute function ratelimit_guard('p', 'customer', 'note')", "", "has no column note of a type"},
		"numeric keys":            {"alter table orders alter size type numeric; " + trigger + "execute function ratelimit_guard('p', 'size')", "", "has no column size of a type"},
		"an array":                {"alter table orders add list text[]; " + trigger + "execute function ratelimit_guard('p', 'list')", "", "has no column list of a type"},
		"blank-padded":            {"alter table orders alter customer type char(9); " + trigger + guard, "", "has no column customer of a type"},
		"no arguments":            {trigger + "execute function ratelimit_guard()", "", "has 0 arguments"},
		"one argument":            {trigger + "execute function ratelimit_guard('p')", "", "has 1 argument."},
		"four arguments":          {trigger + "execute function ratelimit_guard('p', 'customer', 'size', 'size')", "", "has 4 arguments"},
		"a column that is none":   {trigger + "execute function ratelimit_guard('p', 'nobody')", "", "has no column nobody"},
		"an expression":           {trigger + "execute function ratelimit_guard('p', 'spy()')", "", `has no column "spy()"`},
		"a quoted expression":     {trigger + `execute function ratelimit_guard('p', 'customer"::text, spy() --')`, "", "has no column"},
		"a name with a format":    {trigger + `execute function ratelimit_guard('p', '%s%I%1$L')`, "", "has no column"},
		"a name that is too long": {trigger + "execute function ratelimit_guard('p', '" + strings.Repeat("x", 100) + "')", "", "has no column"},
		"a name that is cut":      {"alter table orders rename customer to " + strings.Repeat("x", 63) + "; " + trigger + "execute function ratelimit_guard('p', '" + strings.Repeat("x", 64) + "')", "insert into orders values ('a')", "has no column"},
		"a system column":         {trigger + "execute function ratelimit_guard('p', 'tableoid')", "", "has no column tableoid"},
		"a dropped column": {"alter table orders add gone text; alter table orders drop gone; " + trigger + "execute function ratelimit_guard('p', '........pg.dropped.4........')",
			"", "has no column"},
		"a column of costs that is none": {trigger + "execute function ratelimit_guard('p', 'customer', '1 or spy()')", "", "has no column"},
	}, func(t *testing.T, attack testCase) {
		db, mallory := guardedByASuperuser(t)
		kit.Execute(t, mallory, attack.prepare, pgx.QueryExecModeSimpleProtocol)
		insert := attack.insert
		if insert == "" {
			insert = "insert into orders (customer, size) values ('a', 1)"
		}
		_, err := mallory.Exec(t.Context(), insert)
		kit.RequireState(t, "22023", err)
		require.Contains(t, kit.PgError(err).Detail, attack.detail)
		require.Empty(t, kit.Column(t, db.DB, "select role from spied_on where role <> 'mallory'"))
		require.EqualValues(t, 0, db.Number("select count(*) from ratelimit.buckets"))
	})
}

// guardedByASuperuser is a database whose package belongs to a superuser, and a session of a plain role that may attach
// the guard. The function spy, wherever it is called, tells whose rights it has.
func guardedByASuperuser(t *testing.T) (*kit.TestDB, *pgx.Conn) {
	role := kit.NewRole(t)
	db := kit.NewDB(t)
	require.EqualValues(t, 1, db.Number("select count(*) from pg_roles where rolname = current_user and rolsuper"))
	db.DefinePolicy("p", 100, 1, kit.ADay)
	db.Execute(fmt.Sprintf(`
		create schema mallory authorization %[1]s;
		grant temporary on database %[2]s to %[1]s;
		grant execute on function ratelimit_guard to %[1]s;
		create table public.spied_on (role text);
		grant insert on public.spied_on to public`, role, pgx.Identifier{db.Name}.Sanitize()), pgx.QueryExecModeSimpleProtocol)
	conn := kit.ConnectAs(t, db.DB, role)
	kit.Execute(t, conn, `
		set search_path = mallory, public;
		create table orders (customer text, size integer, note text);
		create function spy() returns text language plpgsql as $$
		begin
		  insert into public.spied_on values (case current_user when '`+role+`' then 'mallory' else current_user end);
		  return 'x';
		end $$`, pgx.QueryExecModeSimpleProtocol)
	return db, conn
}

// What a plain role may do with a guard that somebody attached, and what it needs to attach one.
func TestSecurity_GuardIsAGrantToAttachAndNoneToInsert(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	writer := kit.NewRole(t)
	db, owner := guardedByASuperuser(t)
	kit.Execute(t, owner, `
		create trigger limited after insert on orders referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer');
		grant usage on schema mallory to `+writer+`;
		grant insert on orders to `+writer, pgx.QueryExecModeSimpleProtocol)
	conn := kit.ConnectAs(t, db.DB, writer)
	kit.Execute(t, conn, "insert into mallory.orders (customer) values ('a')")
	require.EqualValues(t, 99, db.Left("p", "a"))

	db.Execute("revoke all on function ratelimit_guard from public")
	kit.Execute(t, conn, "create temporary table mine (customer text)")
	_, err := conn.Exec(ctx, "create trigger limited after insert on mine referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer')")
	kit.RequireState(t, "42501", err)
	kit.RequireState(t, "42501", kit.ErrorOf(conn.Exec(ctx, "select ratelimit_guard()")))

	// A temporary relation of the name of the transition table fails the statement, and nothing else.
	kit.Execute(t, conn, "create temporary table inserted (customer text)")
	kit.RequireState(t, "22023", kit.ErrorOf(conn.Exec(ctx, "insert into mallory.orders (customer) values ('a')")))
	kit.Execute(t, conn, "drop table inserted; insert into mallory.orders (customer) values ('a')", pgx.QueryExecModeSimpleProtocol)
	require.EqualValues(t, 98, db.Left("p", "a"))
}
