package kit

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
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// SameSchema requires that two databases hold the same objects. Rows are not compared.
func SameSchema(t *testing.T, want, got *pgtest.DB) {
	require.Equal(t, FingerprintOf(t, want), FingerprintOf(t, got))
	t.Run("pg_dump", func(t *testing.T) {
		pgDump := FindPgDump(t)
		require.Equal(t, Dump(t, pgDump, want.URL, "--schema-only"), Dump(t, pgDump, got.URL, "--schema-only"))
	})
}

// FingerprintOf describes everything in a database that is not PostgreSQL's own, a line each.
func FingerprintOf(t testing.TB, db *pgtest.DB) (schema string) {
	require.NoError(t, pgx.BeginFunc(context.Background(), db.Pool, func(tx pgx.Tx) error {
		schema = FingerprintIn(t, tx)
		return nil
	}))
	return schema
}

func SchemaAndRows(t testing.TB, db *pgtest.DB) string {
	return FingerprintOf(t, db) + "\n" + strings.Join(RowsOf(t, db), "\n")
}

// FingerprintIn is fingerprintOf in a transaction, with what it changed.
func FingerprintIn(t testing.TB, tx pgx.Tx) string {
	// Names are told in full. To compile the query would take longer than to run it.
	require.NoError(t, ErrorOf(tx.Exec(context.Background(), "select set_config('search_path', '', true), set_config('jit', 'off', true)")))
	lines := ColumnOf(t, tx, schemaQuery)
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

func RowsOf(t testing.TB, db *pgtest.DB) []string {
	var rows []string
	for _, table := range Column(t, db, `
		select format('%I.%I', nspname, relname)
		  from pg_class as c join pg_namespace as n on n.oid = c.relnamespace
		 where c.relkind = 'r' and c.oid >= 16384
		 order by 1`) {
		rows = append(rows, Column(t, db, fmt.Sprintf("select '%[1]s ' || t::text from %[1]s as t order by t::text", table))...)
	}
	return rows
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
	              attstattarget, attacl, (select array_agg(o order by o) from unnest(attoptions) as o where o like 'n\_distinct%'))
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

// FindPgDump returns a pg_dump that is at least as new as the server, or skips the test.
func FindPgDump(t *testing.T) string {
	t.Helper()
	want := NoError(strconv.Atoi(regexp.MustCompile(`^\d+`).FindString(pgtest.Shared(t).Version)))(t)
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

func Dump(t *testing.T, pgDump, url string, options ...string) string {
	t.Helper()
	out, err := exec.Command(pgDump, append(options, "--dbname", url)...).Output()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		t.Fatalf("%v\n%s", err, exit.Stderr)
	}
	require.NoError(t, err)
	// The argument of \restrict is drawn by each run.
	return regexp.MustCompile(`(?m)^\\(un)?restrict .*$`).ReplaceAllString(string(out), "")
}

// Restore runs a dump of one database in another.
func Restore(t *testing.T, from, to string) {
	out, err := RunPsql(t, to, "--set", "ON_ERROR_STOP=1", "--quiet", "--file", File(t, "dump.sql", Dump(t, FindPgDump(t), from)))
	require.NoError(t, err, out)
}

// Releases are the versions of the extension by those of the schema. The last is made up: see NextVersion.
var Releases = map[int32]string{1: "0.3.0", 2: "9.0.0"}
