package tests

import (
	"context"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/migrations/packages"
)

// What sql/ must keep so that Citus can call a function about one bucket on the node that has its shard. The functions that serve
// many buckets on one server are other ones there: the second list is as they are rendered for Citus.
func TestCatalog_FunctionsAboutOneBucketFitCitus(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	plain := append([]string{"peek"}, hotFunctions...)
	for _, function := range append([]string{
		"acquire", "acquire_ephemeral", "acquire_up_to_ephemeral", "charge_ephemeral", "reserve_ephemeral", "settle_ephemeral", "bucket_now",
	}, plain...) {
		lintForCitus(t, db, function, db.text("select string_agg(prosrc, '' order by oid) from pg_proc where proname = $1", function))
	}
	require.Empty(t, db.strings("select p.oid::regprocedure::text from pg_proc as p where p.proname = any ('{"+strings.Join(plain, ",")+`}')
		   and exists (select from pg_type as t join pg_class as c on c.oid = t.typrelid
		                where t.oid = any (p.proargtypes || p.prorettype) and c.relkind = 'r')`), "the row type of a table is in the signature")

	files, err := packages.One(os.DirFS(".."), "citus")
	require.NoError(t, err)
	rendered := string(files["citus/citus.sql"])
	require.NotRegexp(t, `[^\x00-\x7f]`, rendered, "psql takes the file to be in the encoding of its locale")
	for _, function := range []string{
		"acquire_here", "peek_here", "refund_here", "reset_here", "charge_here", "settle_here", "reserve_here", "acquire_up_to_here",
		"decide_here", "decide_in_order", "look_at_buckets", "rows_of_buckets", "live_idempotency_keys", "lock_buckets", "create_buckets",
		"write_buckets", "remember_idempotency_keys", "rows_of_ephemeral_buckets", "live_ephemeral_idempotency_keys", "lock_ephemeral_buckets",
		"create_ephemeral_buckets", "write_ephemeral_buckets", "remember_ephemeral_idempotency_keys",
	} {
		found := regexp.MustCompile(`(?s)create or replace function ratelimit\.` + function + `\(.*?as \$\$\n(.*?)\n\$\$;`).FindStringSubmatch(rendered)
		require.NotNil(t, found, function)
		lintForCitus(t, db, function, found[1])
	}
}

// A linter that has never failed proves nothing.
func TestCatalog_LintForCitusFindsFaults(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	for _, statement := range []string{
		"select b.level into v_level from buckets as b where b.policy_id = v_policy.id and b.key >= v_key",
		"select b.level into v_level from buckets as b where b.key = v_key and exists (select from idempotency_keys as k where k.key = b.key)",
		"update buckets as b set level = 0, key = v_other where b.policy_id = v_policy.id and b.key = v_key",
		"update buckets as b set level = 0 where b.policy_id = v_policy.id and (b.key = v_key or b.level > 0)",
		"update ephemeral_buckets as b set level = 0 from unnest(v_keys) as u (key) where b.key = u.key",
		"delete from buckets as b where b.ctid = v_row and b.key = v_key",
		"update buckets as b set refilled_at = clock() where b.key = v_key",
		"update buckets as b set due_at = v_now + duration(1) where b.key = v_key",
		"delete from idempotency_keys as k where k.key = v_key and k.expires_at < now()",
		"insert into idempotency_keys (policy_id, idempotency_key) values (v_policy.id, v_idempotency_key)",
		"insert into buckets (policy_id, key, level) select v_policy.id, u.key, 0 from unnest(v_keys) as u (key)",
	} {
		require.NotEmpty(t, faultsForCitus(t, db, "begin\n  "+statement+";\nend;"), statement)
	}
	require.Empty(t, faultsForCitus(t, db, "update buckets as b set level = microtokens(b.level) where b.policy_id = v_policy.id and b.key = v_key"))
}

func lintForCitus(t *testing.T, db *testDB, function, body string) {
	require.NotEmpty(t, body, function)
	require.Empty(t, faultsForCitus(t, db, body), function)
}

var (
	sqlComment  = regexp.MustCompile(`--[^\n]*|'[^']*'`)
	sqlTable    = regexp.MustCompile(`\b(?:from|update|into|join) (?:ratelimit\.)?(?:ephemeral_)?(?:buckets|idempotency_keys)\b`)
	sqlKeyTerm  = regexp.MustCompile(`^(?:\w+\.)?key\s*=\s*v_\w+$`)
	sqlSetKey   = regexp.MustCompile(`[ ,]key\s*=`)
	sqlInsert   = regexp.MustCompile(`insert into \w+ (?:as \w+\s+)?\(policy_id, key,[^()]*\)\s+values \(`)
	sqlCall     = regexp.MustCompile(`\b([a-z_]+)\(`)
	sqlMoved    = regexp.MustCompile(`[-+]\s*(?:duration\(|interval)`) // an instant and an interval: the operator is not immutable
	sqlNotCalls = []string{"and", "or", "in", "values", "any", "exists", "least", "greatest", "coalesce", "nullif", "row", "when", "then", "else", "not", "array", "case", "key"}
)

// faultsForCitus checks the statements of a body that are about buckets or idempotency keys.
func faultsForCitus(t *testing.T, db *testDB, body string) (faults []string) {
	for _, statement := range strings.Split(sqlComment.ReplaceAllString(body, ""), ";") {
		at := sqlTable.FindStringIndex(statement)
		if at == nil {
			continue
		}
		statement = strings.Join(strings.Fields(statement), " ")
		fault := func(what string) { faults = append(faults, what+": "+statement) }
		if strings.Contains(statement, "ctid") {
			fault("finds a row by its id")
		}
		if len(sqlTable.FindAllString(statement, -1)) > 1 {
			fault("is about two tables")
		}
		changing := "" // the clauses whose functions must be immutable
		if strings.Contains(statement, "insert into") {
			if !sqlInsert.MatchString(statement) {
				fault("inserts no single row with a key")
			}
			if _, after, found := strings.Cut(statement, " on conflict "); found {
				changing = after
			}
		} else {
			_, where, _ := strings.Cut(statement, " where ")
			where = regexp.MustCompile(` (?:returning|for update|order by)\b.*`).ReplaceAllString(where, "")
			if !slices.ContainsFunc(terms(where), sqlKeyTerm.MatchString) {
				fault("has no term key = local")
			}
			if changing = where; strings.Contains(statement, "update ") {
				if _, set, found := strings.Cut(statement, " set "); found {
					changing, _, _ = strings.Cut(set, " returning ")
					if sqlSetKey.MatchString(" " + strings.TrimSuffix(changing, where)) {
						fault("changes the key")
					}
				}
			}
		}
		if sqlMoved.MatchString(changing) {
			fault("moves an instant")
		}
		for _, call := range sqlCall.FindAllStringSubmatch(changing, -1) {
			if slices.Contains(sqlNotCalls, call[1]) {
				continue
			}
			var immutable bool
			err := db.Pool.QueryRow(context.Background(), `select coalesce(bool_and(p.provolatile = 'i'), false) from pg_proc as p
				where p.proname = $1 and p.pronamespace in ('pg_catalog'::regnamespace, 'ratelimit'::regnamespace)`, call[1]).Scan(&immutable)
			require.NoError(t, err)
			if !immutable {
				fault(call[1] + " is not immutable")
			}
		}
	}
	return faults
}

// terms splits a condition at its outermost and.
func terms(condition string) (all []string) {
	depth, start := 0, 0
	for i, c := range condition {
		switch {
		case c == '(':
			depth++
		case c == ')':
			depth--
		case depth == 0 && strings.HasPrefix(condition[i:], " and "):
			all = append(all, strings.TrimSpace(condition[start:i]))
			start = i + len(" and ")
		}
	}
	return append(all, strings.TrimSpace(condition[start:]))
}

func (db *testDB) text(sql string, args ...any) string {
	rows, err := db.Pool.Query(context.Background(), sql, args...)
	require.NoError(db.t, err)
	found, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
	require.NoError(db.t, err)
	return found
}
