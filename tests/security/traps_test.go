package security

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/migrations"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Code that runs with the search_path of whoever runs it finds, in schema public, what others put there. PostgreSQL's own functions and
// operators come first only where their argument types match exactly; where they would take a conversion, a planted one for just these
// types wins, and runs with the rights of the installer. traps plants all of those for the types that the code deals in.
const traps = `
	do $plant$
	declare
	  v_types constant text[] := array['oid', 'regnamespace', 'regclass', 'regproc', 'regprocedure', 'regrole', 'regtype', 'name', 'text',
	                                   '"char"', 'integer', 'bigint', 'smallint', 'numeric', 'double precision', 'boolean',
	                                   'interval', 'timestamptz', 'json', 'oid[]', 'text[]', 'name[]', 'bigint[]'];
	  v record;
	begin
	  for v in select l, r, result, symbols, 'trap_' || row_number() over () as trap
	             from unnest(v_types) as l, unnest(v_types) as r,
	                  (values ('boolean', array['=', '<>', '<', '>', '<=', '>=']), ('text', array['||']), ('numeric', array['+', '-', '*', '/', '%'])) as k (result, symbols)
	  loop
	    execute pg_catalog.format('create function public.%s(%s, %s) returns %s language plpgsql as $f$ begin raise exception ''a trap for %% and %%'', %L, %L; end $f$',
	                   v.trap, v.l, v.r, v.result, v.l, v.r);
	    for i in 1 .. cardinality(v.symbols) loop
	      if not exists (select from pg_operator where oprname = v.symbols[i] and oprleft = v.l::regtype::oid and oprright = v.r::regtype::oid) then
	        execute pg_catalog.format('create operator public.%s (leftarg = %s, rightarg = %s, function = public.%s)', v.symbols[i], v.l, v.r, v.trap);
	      end if;
	    end loop;
	  end loop;
	  for v in select pg_catalog.format('%s(text, %s)', name, types) as signature
	             from (values ('format', 'text'), ('format', 'name'), ('format', 'name, name'), ('format', 'text, text'), ('format', 'regproc'),
	                          ('format', 'oid'), ('format', 'integer'), ('format', 'bigint'), ('format', 'bigint, bigint'), ('format', 'text, bigint, bigint'),
	                          ('format', 'text, boolean'), ('json_build_object', 'text, text, bigint, text, bigint, text, bigint, text, boolean, text, boolean, text, bigint')) as f (name, types)
	           union all values ('pg_advisory_xact_lock(integer)'), ('json_agg(json)'), ('hashtext(name)'), ('set_config(text, text, integer)')
	  loop
	    execute pg_catalog.format('create function public.%s returns text language plpgsql as $f$ begin raise exception ''a trap for %%'', %L; end $f$', v.signature, v.signature);
	  end loop;
	end
	$plant$`

func trapped(t *testing.T) *pgtest.DB {
	planter := kit.NewRole(t)
	db := pgtest.Empty(t)
	db.Exec(t, "grant create on schema public to "+planter)
	kit.Execute(t, kit.ConnectAs(t, db, planter), traps)
	for _, sql := range []string{"select 1::oid = 'public'::regnamespace", "select 1.0 * 1", "select format('%s', 'x'::name)"} {
		require.ErrorContains(t, kit.ErrorOf(db.Pool.Exec(context.Background(), sql)), "a trap for", sql)
	}
	return db
}

func TestSecurity_InstallingRunsNobodysCode(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	db := trapped(t)
	require.NoError(t, migrations.Up(ctx, db.Connect(t)))
	db.Exec(t, "update ratelimit.version set version = 0")
	again := migrations.Up(ctx, db.Connect(t))
	require.Equal(t, "42P06", kit.SQLState(again), "%v", again)
	db.Exec(t, "update ratelimit.version set version = $1", kit.NewestMigration(t))
	_, err := db.Pool.Exec(ctx, kit.Script(t, "schedule.sql"))
	require.NotEqual(t, "P0001", kit.SQLState(err), "%v", err)
	for range 2 {
		kit.InstallPreRequest(t, db)
	}
	kit.Execute(t, db.Connect(t), kit.PreRequestScript(t, "uninstall.sql"), pgx.QueryExecModeSimpleProtocol)
	kit.InstallPreRequest(t, db)
	require.NoError(t, migrations.Down(ctx, db.Connect(t)))

	for range 2 { // first to install or remove, then to find that it is done
		kit.PsqlFile(t, db.URL, "install.sql")
	}
	for range 2 {
		kit.PsqlFile(t, db.URL, "uninstall.sql")
	}
}

func TestSecurity_TheClientRunsNobodysCode(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	db := pgtest.New(t)
	db.Exec(t, traps)
	limiter := client.New(db.Pool)
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "p", Capacity: 10, Refill: 1, Every: 1e9, Remember: 1e9}))
	require.NoError(t, kit.ErrorOf(limiter.Acquire(ctx, "p", "k", client.Cost(2), client.IdempotencyKey("first"))))
	require.NoError(t, kit.ErrorOf(limiter.Peek(ctx, "p", "k", client.Cost(2))))
	require.NoError(t, kit.ErrorOf(limiter.Refund(ctx, "p", "k", 1)))
	_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "p", Key: "k"}, {Policy: "p", Key: "l"}}, client.IdempotencyKey("second"))
	require.NoError(t, err)
	require.NoError(t, limiter.Override(ctx, client.Override{Policy: "p", Key: "k"}))
	require.NoError(t, kit.ErrorOf(limiter.Overrides(ctx)))
	require.NoError(t, kit.ErrorOf(limiter.RemoveOverride(ctx, "p", "k")))
	require.NoError(t, kit.ErrorOf(limiter.Policies(ctx)))
	require.NoError(t, limiter.Reset(ctx, "p", "k"))
	require.NoError(t, kit.ErrorOf(limiter.Cleanup(ctx)))
	require.NoError(t, limiter.DropPolicy(ctx, "p"))
}
