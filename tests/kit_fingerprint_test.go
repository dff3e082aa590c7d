package tests

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// sameSchema requires that two databases hold the same objects. Rows are not compared.
func sameSchema(t *testing.T, want, got *pgtest.DB) {
	require.Equal(t, fingerprintOf(t, want), fingerprintOf(t, got))
	t.Run("pg_dump", func(t *testing.T) {
		pgDump := findPgDump(t)
		require.Equal(t, dump(t, pgDump, want.URL, "--schema-only"), dump(t, pgDump, got.URL, "--schema-only"))
	})
}

// sameSchemaOf is sameSchema where some of it belongs to a role in got, and to the tests' role in want.
func sameSchemaOf(t *testing.T, role string, want, got *pgtest.DB) {
	me := column(t, want, "select current_user::text")[0]
	rename := func(schema string) string {
		lines := strings.Split(strings.ReplaceAll(schema, role, me), "\n")
		slices.Sort(lines)
		return strings.Join(lines, "\n")
	}
	require.Equal(t, rename(fingerprintOf(t, want)), rename(fingerprintOf(t, got)))
}

// fingerprintOf describes everything in a database that is not PostgreSQL's own, a line each.
func fingerprintOf(t testing.TB, db *pgtest.DB) (schema string) {
	require.NoError(t, pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error {
		schema = fingerprintIn(t, tx)
		return nil
	}))
	return schema
}

// fingerprintIn is fingerprintOf in a transaction, with what it changed.
func fingerprintIn(t testing.TB, tx pgx.Tx) string {
	_, err := tx.Exec(context.Background(), "set local search_path = ''") // so that names are told in full
	require.NoError(t, err)
	lines := columnOf(t, tx, schemaQuery)
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// rowsOf lists the rows of all tables.
func rowsOf(t testing.TB, db *pgtest.DB) []string {
	var rows []string
	for _, table := range column(t, db, `
		select format('%I.%I', nspname, relname)
		  from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
		 where c.relkind = 'r' and c.oid >= 16384
		 order by 1`) {
		rows = append(rows, column(t, db, fmt.Sprintf("select '%[1]s ' || t::text from %[1]s as t order by t::text", table))...)
	}
	return rows
}

// stateOf is the fingerprint of a database and the rows of its tables.
func stateOf(t testing.TB, db *pgtest.DB) string {
	return fingerprintOf(t, db) + "\n" + strings.Join(rowsOf(t, db), "\n")
}

// beforeInstall removes from a fingerprint what stays when tern removes the package: its version table, and the schema of that table.
func beforeInstall(schema string) string {
	lines := slices.DeleteFunc(strings.Split(schema, "\n"), func(line string) bool {
		return strings.Contains(line, "ratelimit.schema_version") ||
			line == "object schema ratelimit" || strings.HasPrefix(line, "schema ratelimit owner")
	})
	return strings.Join(lines, "\n")
}

const schemaQuery = `
	-- everything that has a place among the others, whatever it is
	select 'object ' || i.type || ' ' || i.identity
	  from (select classid, objid from pg_depend
	         union
	        select 'pg_namespace'::regclass, oid from pg_namespace) as d
	 cross join lateral pg_identify_object(d.classid, d.objid, 0) as i
	 where d.objid >= 16384
	   and i.schema is distinct from 'pg_toast'
	   and i.type <> 'toast table'
	union all
	select format('comment on %s %s: %s', i.type, i.identity, d.description)
	  from pg_description as d
	 cross join lateral pg_identify_object(d.classoid, d.objoid, d.objsubid) as i
	 where d.objoid >= 16384
	union all
	select format('schema %I owner %s acl %s', nspname, nspowner::regrole, nspacl)
	  from pg_namespace
	 where nspname !~ '^pg_'
	union all
	select format('function %s owner %s acl %s cost %s rows %s leakproof %s: %s', p.oid::regprocedure, proowner::regrole,
	              proacl, procost, prorows, proleakproof, replace(pg_get_functiondef(p.oid), E'\n', '\n'))
	  from pg_proc as p
	 where p.oid >= 16384 and prokind <> 'a'
	union all
	select format('%s %s persistence %s owner %s acl %s method %s tablespace %s rls %s %s replica identity %s of type %s partition %s %s options %s %s: %s',
	              case relkind when 'r' then 'table' else relkind::text end, c.oid::regclass, relpersistence,
	              relowner::regrole, relacl, a.amname, reltablespace, relrowsecurity, relforcerowsecurity, relreplident,
	              nullif(reloftype, 0)::regtype, relispartition, pg_get_partkeydef(c.oid), reloptions,
	              (select toast.reloptions from pg_class as toast where toast.oid = c.reltoastrelid),
	              case when relkind in ('v', 'm') then translate(pg_get_viewdef(c.oid), e'\n', ' ') end)
	  from pg_class as c
	  left join pg_am as a on a.oid = c.relam
	 where c.oid >= 16384 and relnamespace <> 'pg_toast'::regnamespace
	union all
	-- with its place among the columns that there are
	select format('column %s.%I #%s %s collate %s not null %s identity %s generated %s default %s storage %s %s statistics %s acl %s options %s',
	              c.oid::regclass, attname, row_number() over (partition by c.oid order by attnum), format_type(atttypid, atttypmod), nullif(attcollation, 0)::regcollation,
	              attnotnull, attidentity, attgenerated, translate(pg_get_expr(d.adbin, d.adrelid), e'\n', ' '), attstorage, attcompression,
	              attstattarget, attacl, nullif(attoptions, '{}'))
	  from pg_attribute as a
	  join pg_class as c on c.oid = a.attrelid
	  left join pg_attrdef as d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
	 where c.oid >= 16384 and attnum > 0 and not attisdropped and relnamespace <> 'pg_toast'::regnamespace
	union all
	select format('constraint %I on %s: %s validated %s no inherit %s', conname,
	              case when contypid <> 0 then contypid::regtype::text else conrelid::regclass::text end,
	              pg_get_constraintdef(oid), convalidated, connoinherit)
	  from pg_constraint
	 where oid >= 16384
	union all
	select format('index %s valid %s ready %s clustered %s replica identity %s', pg_get_indexdef(i.indexrelid),
	              indisvalid, indisready, indisclustered, indisreplident)
	  from pg_index as i
	  join pg_class as c on c.oid = i.indexrelid
	 where c.oid >= 16384 and c.relnamespace <> 'pg_toast'::regnamespace
	union all
	select format('type %s owner %s acl %s %s %s not null %s default %s labels %s', t.oid::regtype, typowner::regrole, typacl,
	              typtype, nullif(typbasetype, 0)::regtype, typnotnull, typdefault,
	              (select array_agg(enumlabel order by enumsortorder) from pg_enum where enumtypid = t.oid))
	  from pg_type as t
	 where oid >= 16384
	union all
	select format('trigger %s enabled %s', pg_get_triggerdef(oid), tgenabled) from pg_trigger where oid >= 16384 and not tgisinternal
	union all
	select format('event trigger %I on %s: %s enabled %s tags %s', evtname, evtevent, evtfoid::regproc, evtenabled, evttags)
	  from pg_event_trigger where oid >= 16384
	union all
	select format('rule %s enabled %s', translate(pg_get_ruledef(oid), e'\n', ' '), ev_enabled) from pg_rewrite where oid >= 16384
	union all
	select format('policy %I on %s: %s permissive %s to %s using %s check %s', polname, polrelid::regclass, polcmd, polpermissive,
	              polroles::regrole[], pg_get_expr(polqual, polrelid), pg_get_expr(polwithcheck, polrelid))
	  from pg_policy
	union all
	select 'statistics ' || pg_get_statisticsobjdef(oid) from pg_statistic_ext
	union all
	select format('sequence %s: %s', seqrelid::regclass, to_jsonb(s) - 'seqrelid' - 'seqtypid') from pg_sequence as s
	union all
	select format('%s inherits %s', inhrelid::regclass, inhparent::regclass) from pg_inherits
	union all
	select format('cast %s to %s by %s context %s', castsource::regtype, casttarget::regtype, nullif(castfunc, 0)::regprocedure, castcontext)
	  from pg_cast where oid >= 16384
	union all
	select format('operator %s is %s', oid::regoperator, oprcode::regproc) from pg_operator where oid >= 16384
	union all
	select format('extension %I %s in %s', extname, extversion, extnamespace::regnamespace) from pg_extension
	union all
	select format('publication of %s', prrelid::regclass) from pg_publication_rel
	union all
	select format('security label of %s: %s', objoid, label) from pg_seclabel
	union all
	select format('default privileges of %s in %s on %s: %s', defaclrole::regrole, nullif(defaclnamespace, 0)::regnamespace, defaclobjtype, defaclacl)
	  from pg_default_acl
	union all
	select format('setting of role %s: %s', setrole, setconfig)
	  from pg_db_role_setting
	 where setdatabase = (select oid from pg_database where datname = current_database())`

// findPgDump returns a pg_dump that is at least as new as the server, or skips the test.
func findPgDump(t *testing.T) string {
	t.Helper()
	want, err := strconv.Atoi(regexp.MustCompile(`^\d+`).FindString(pgtest.Shared(t).Version))
	require.NoError(t, err)
	candidates, _ := filepath.Glob("/usr/lib/postgresql/*/bin/pg_dump")
	candidates = append(candidates, "pg_dump")
	if bin := os.Getenv("RATELIMIT_PG_BIN"); bin != "" {
		candidates = append(candidates, filepath.Join(bin, "pg_dump"))
	}
	for _, candidate := range slices.Backward(candidates) {
		out, err := exec.Command(candidate, "--version").Output()
		if err != nil {
			continue
		}
		match := regexp.MustCompile(`\) (\d+)`).FindSubmatch(out)
		if match == nil {
			continue
		}
		if have, _ := strconv.Atoi(string(match[1])); have >= want {
			return candidate
		}
	}
	t.Skipf("no pg_dump of PostgreSQL %d or newer on this machine; the catalogs were compared", want)
	return ""
}

func dump(t *testing.T, pgDump, url string, options ...string) string {
	t.Helper()
	out, err := exec.Command(pgDump, append(options, "--dbname", url)...).Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		t.Fatalf("%v\n%s", err, exit.Stderr)
	}
	require.NoError(t, err)
	// The argument of \restrict is drawn by each run.
	return regexp.MustCompile(`(?m)^\\(un)?restrict .*$`).ReplaceAllString(string(out), "")
}

// Each is one difference of a kind that sameSchema has to see.
var differences = []string{
	"create or replace function ratelimit.clock() returns timestamptz language sql volatile parallel safe as 'select now()'",
	"alter function ratelimit.clock() stable",
	"alter function ratelimit.clock() parallel unsafe",
	"alter function ratelimit.clock() cost 7",
	"alter function ratelimit.clock() leakproof",
	"alter function ratelimit.clock() strict",
	"alter function ratelimit_acquire set work_mem = '1MB'",
	"alter function ratelimit_acquire reset enable_seqscan",
	"alter function ratelimit_acquire security invoker",
	"alter function ratelimit_acquire owner to pg_monitor",
	"alter function ratelimit_acquire set schema ratelimit",
	"alter function ratelimit_policies() rows 7",
	"alter procedure ratelimit_cleanup_all security definer",
	"grant execute on function ratelimit_acquire to pg_monitor",
	"grant execute on function ratelimit_acquire to public",
	"grant execute on procedure ratelimit_cleanup_all to pg_monitor with grant option",
	"comment on function ratelimit_acquire is 'Other.'",
	"comment on function ratelimit_acquire is null",
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
	"alter table ratelimit.buckets set logged; alter table ratelimit.ephemeral_buckets set logged",
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
	"comment on table ratelimit.buckets is 'Other.'",
	"comment on column ratelimit.buckets.level is 'Other.'",
	"comment on index ratelimit.buckets_pkey is 'Other.'",
	"drop index ratelimit.buckets_due_at_idx",
	"create index on ratelimit.buckets (level)",
	"alter index ratelimit.buckets_due_at_idx set (fillfactor = 71)",
	"alter index ratelimit.buckets_due_at_idx rename to other",
	"alter table ratelimit.policies drop constraint policies_id_key",
	"alter table ratelimit.policies rename constraint policies_id_key to other",
	"alter table ratelimit.policies add constraint mine check (capacity > 0)",
	"alter table ratelimit.policies add constraint mine check (capacity > 0) not valid",
	"alter type ratelimit.decision add attribute more integer",
	"alter type ratelimit.decision owner to pg_monitor",
	"grant usage on type ratelimit.decision to pg_monitor",
	"comment on type ratelimit.decision is 'Other.'",
	"create domain ratelimit.mine as integer check (value > 0)",
	"create type ratelimit.mine as enum ('a')",
	"alter schema ratelimit owner to pg_monitor",
	"grant usage on schema ratelimit to pg_monitor",
	"comment on schema ratelimit is 'Other.'",
	"create schema other",
	"drop table ratelimit.schema_version",
	"grant select on ratelimit.schema_version to pg_monitor",
	"alter default privileges in schema ratelimit grant select on tables to pg_monitor",
}

func TestSameSchema_SeesEveryDifference(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	want := fingerprintOf(t, db)
	for _, difference := range differences {
		t.Run(difference, func(t *testing.T) {
			tx, err := db.Pool.Begin(t.Context())
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			require.NoError(t, errorOf(tx.Exec(t.Context(), difference)))
			require.NotEqual(t, want, fingerprintIn(t, tx))
		})
	}
	require.Equal(t, want, fingerprintOf(t, db))
}

// A column without options has null or an empty array, which depends on its history and on the release of PostgreSQL.
func TestSameSchema_DoesNotSeeHowNoOptionsAreStored(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	want := fingerprintOf(t, db)
	db.Exec(t, "update pg_attribute set attoptions = '{}' where attrelid = 'ratelimit.buckets'::regclass and attname = 'level'")
	require.Equal(t, want, fingerprintOf(t, db))
}
