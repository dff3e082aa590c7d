package tests

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// A guard runs with the rights of the package's owner, here a superuser, on tables and in sessions of a plain role. Each
// attack has code of that role where the guard would read. All are refused before a row is read.
func TestSecurity_GuardReadsNothingHostile(t *testing.T) {
	t.Parallel()
	const guard = "execute function ratelimit_guard('p', 'customer')"
	const trigger = "create trigger limited after insert on orders referencing new table as inserted for each statement "
	for name, attack := range map[string]struct{ prepare, insert, detail string }{
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
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, mallory := guardedByASuperuser(t)
			execute(t, mallory, attack.prepare, pgx.QueryExecModeSimpleProtocol)
			insert := attack.insert
			if insert == "" {
				insert = "insert into orders (customer, size) values ('a', 1)"
			}
			_, err := mallory.Exec(t.Context(), insert)
			requireState(t, "22023", err)
			require.Contains(t, pgError(err).Detail, attack.detail)
			require.Empty(t, column(t, db.DB, "select role from spied_on where role <> 'mallory'"))
			require.EqualValues(t, 0, db.number("select count(*) from ratelimit.buckets"))
		})
	}
}

// guardedByASuperuser is a database whose package belongs to a superuser, and a session of a plain role that may attach
// the guard. The function spy, wherever it is called, tells whose rights it has.
func guardedByASuperuser(t *testing.T) (*testDB, *pgx.Conn) {
	role := newRole(t)
	db := newDB(t)
	require.EqualValues(t, 1, db.number("select count(*) from pg_roles where rolname = current_user and rolsuper"))
	db.definePolicy("p", 100, 1, aDay)
	db.exec(fmt.Sprintf(`
		create schema mallory authorization %[1]s;
		grant temporary on database %[2]s to %[1]s;
		grant execute on function ratelimit_guard to %[1]s;
		create table public.spied_on (role text);
		grant insert on public.spied_on to public`, role, pgx.Identifier{db.Name}.Sanitize()), pgx.QueryExecModeSimpleProtocol)
	conn := connectAs(t, db.DB, role)
	execute(t, conn, `
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
	writer := newRole(t)
	db, owner := guardedByASuperuser(t)
	execute(t, owner, `
		create trigger limited after insert on orders referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer');
		grant usage on schema mallory to `+writer+`;
		grant insert on orders to `+writer, pgx.QueryExecModeSimpleProtocol)
	conn := connectAs(t, db.DB, writer)
	execute(t, conn, "insert into mallory.orders (customer) values ('a')")
	require.EqualValues(t, 99, db.left("p", "a"))

	db.exec("revoke all on function ratelimit_guard from public")
	execute(t, conn, "create temporary table mine (customer text)")
	_, err := conn.Exec(ctx, "create trigger limited after insert on mine referencing new table as inserted for each statement execute function ratelimit_guard('p', 'customer')")
	requireState(t, "42501", err)
	requireState(t, "42501", errorOf(conn.Exec(ctx, "select ratelimit_guard()")))

	// A temporary relation of the name of the transition table fails the statement, and nothing else.
	execute(t, conn, "create temporary table inserted (customer text)")
	requireState(t, "22023", errorOf(conn.Exec(ctx, "insert into mallory.orders (customer) values ('a')")))
	execute(t, conn, "drop table inserted; insert into mallory.orders (customer) values ('a')", pgx.QueryExecModeSimpleProtocol)
	require.EqualValues(t, 98, db.left("p", "a"))
}
