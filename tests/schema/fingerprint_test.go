package schema

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// schemaAsMine is the fingerprint of a database with what belongs to a role as if it belonged to the tests' role.
func schemaAsMine(t *testing.T, role string, db *pgtest.DB) string {
	me := kit.Column(t, db, "select current_user::text")[0]
	lines := strings.Split(strings.ReplaceAll(kit.FingerprintOf(t, db), role, me), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// beforeInstall removes from a fingerprint what stays when tern removes the package: its version table, and the schema of that table.
func beforeInstall(schema string) string {
	lines := slices.DeleteFunc(strings.Split(schema, "\n"), func(line string) bool {
		return strings.Contains(line, "ratelimit.version") ||
			line == "object schema ratelimit" || strings.HasPrefix(line, "schema ratelimit owner")
	})
	return strings.Join(lines, "\n")
}

// Each is one difference of a kind that sameSchema has to see.
var differences = []string{
	"create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe as 'select now()'",
	"alter function ratelimit.clock() parallel unsafe",
	"alter function ratelimit.clock() cost 7",
	"alter function ratelimit.clock() leakproof",
	"alter function ratelimit_acquire set work_mem = '1MB'",
	"alter function ratelimit_acquire security invoker",
	"alter function ratelimit_acquire owner to pg_monitor",
	"alter function ratelimit_acquire set schema ratelimit",
	"alter function ratelimit_policies() rows 7",
	"alter procedure ratelimit_cleanup_all security definer",
	"grant execute on function ratelimit_acquire to public",
	"grant execute on procedure ratelimit_cleanup_all to pg_monitor with grant option",
	"comment on function ratelimit_acquire is 'Other.'",
	"drop function ratelimit_version",
	"create function ratelimit_new() returns integer language sql as 'select 1'",
	"create aggregate ratelimit.total(bigint) (sfunc = int8pl, stype = bigint)",
	"alter table ratelimit.buckets add column more integer",
	"alter table ratelimit.buckets alter column level type numeric",
	"alter table ratelimit.buckets alter column level drop not null",
	"alter table ratelimit.buckets alter column level set default 0",
	"alter table ratelimit.buckets alter column level set statistics 7",
	"alter table ratelimit.buckets alter column level set (n_distinct = 7)",
	"alter table ratelimit.buckets alter column key set storage plain",
	`alter table ratelimit.buckets alter column key type text collate "POSIX"`,
	"alter table ratelimit.policies alter column tick drop expression",
	"alter table ratelimit.policies drop column gain; alter table ratelimit.policies add column gain numeric not null generated always as (refill::numeric) stored",
	"alter table ratelimit.buckets rename column level to tokens",
	"alter table ratelimit.buckets rename to other",
	"alter table ratelimit.buckets set unlogged",
	"alter table ratelimit.buckets set (fillfactor = 71)",
	"alter table ratelimit.buckets set (toast.autovacuum_enabled = off)",
	"alter table ratelimit.buckets reset (autovacuum_vacuum_cost_delay)",
	"alter table ratelimit.buckets owner to pg_monitor",
	"alter table ratelimit.buckets replica identity full",
	"alter table ratelimit.buckets enable row level security",
	"alter table ratelimit.buckets force row level security",
	"alter table ratelimit.buckets cluster on buckets_due_at_idx",
	"create policy mine on ratelimit.buckets using (true)",
	"create rule mine as on delete to ratelimit.buckets do also select 1",
	"create trigger mine before update on ratelimit.buckets for each row execute function suppress_redundant_updates_trigger()",
	"create statistics ratelimit.mine on policy_id, key from ratelimit.buckets",
	"create table ratelimit.heir () inherits (ratelimit.buckets)",
	"create view ratelimit.mine as select 1",
	"create sequence ratelimit.mine",
	"grant select on ratelimit.buckets to pg_monitor",
	"grant select (level) on ratelimit.buckets to pg_monitor",
	"comment on column ratelimit.buckets.level is 'Other.'",
	"drop index ratelimit.buckets_due_at_idx",
	"create index on ratelimit.buckets (level)",
	"alter index ratelimit.buckets_due_at_idx set (fillfactor = 71)",
	"alter index ratelimit.buckets_due_at_idx rename to other",
	"alter table ratelimit.policies drop constraint policies_id_key",
	"alter table ratelimit.policies add constraint mine check (capacity > 0)",
	"alter table ratelimit.policies add constraint mine check (capacity > 0) not valid",
	"alter type ratelimit.decision add attribute more integer",
	"alter type ratelimit.decision owner to pg_monitor",
	"grant usage on type ratelimit.decision to pg_monitor",
	"create domain ratelimit.mine as integer check (value > 0)",
	"create type ratelimit.mine as enum ('a')",
	"alter schema ratelimit owner to pg_monitor",
	"grant usage on schema ratelimit to pg_monitor",
	"comment on schema ratelimit is 'Other.'",
	"create schema other",
	"drop table ratelimit.version",
	"grant select on ratelimit.version to pg_monitor",
	"alter default privileges in schema ratelimit grant select on tables to pg_monitor",
}

func TestSameSchema_SeesEveryDifference(t *testing.T) {
	pgtest.OncePerServer(t)
	db := pgtest.Parallel(t)
	want := kit.FingerprintOf(t, db)
	for _, difference := range differences {
		t.Run(difference, func(t *testing.T) {
			tx := kit.NoError(db.Pool.Begin(t.Context()))(t)
			defer tx.Rollback(context.Background())
			require.NoError(t, kit.ErrorOf(tx.Exec(t.Context(), difference)))
			require.NotEqual(t, want, kit.FingerprintIn(t, tx))
		})
	}
	require.Equal(t, want, kit.FingerprintOf(t, db))
}

// A column without options has null, an empty array, or what the server keeps for itself: PostgreSQL 17.12 has a pg_attver in each.
func TestSameSchema_DoesNotSeeHowNoOptionsAreStored(t *testing.T) {
	db := pgtest.Parallel(t)
	want := kit.FingerprintOf(t, db)
	for _, options := range []string{"{}", "{pg_attver=1}"} {
		db.Exec(t, "update pg_attribute set attoptions = $1::text::text[] where attrelid = 'ratelimit.buckets'::regclass and attname = 'level'", options)
		require.Equal(t, want, kit.FingerprintOf(t, db), options)
	}
}
