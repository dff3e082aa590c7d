package kit

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

// Traces is what the open transaction of a session has left so far.
type Traces struct {
	Xid    bool  // it has a transaction id
	Writes int64 // rows inserted, updated, deleted in any table of the package
}

func (s *Session) Traces() (found Traces) {
	require.NoError(s.Db.T, s.QueryRow(context.Background(), `
		select pg_current_xact_id_if_assigned() is not null, sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint
		  from pg_stat_xact_user_tables where schemaname = 'ratelimit'`).Scan(&found.Xid, &found.Writes))
	return found
}

// WalRecords runs a query and returns how many WAL records this session wrote for it.
func (s *Session) WalRecords(sql string) int64 {
	explained := One[[]byte](s.Db.T, s, "explain (analyze, wal, format json) "+sql)
	var plans []struct {
		Plan struct {
			Records *int64 `json:"WAL Records"`
		}
	}
	require.NoError(s.Db.T, json.Unmarshal(explained, &plans))
	require.Len(s.Db.T, plans, 1)
	require.NotNil(s.Db.T, plans[0].Plan.Records)
	return *plans[0].Plan.Records
}

// Guarded creates a table with a guard that counts rows, and one whose rows have costs.
func (db *TestDB) Guarded(policy, table string) {
	db.Execute(fmt.Sprintf(`
		create table %[2]s (customer text, size integer, note text);
		create trigger limited after insert on %[2]s referencing new table as inserted for each statement execute function ratelimit_guard('%[1]s', 'customer');
		create table %[2]s_of_sizes (like %[2]s);
		create trigger limited after insert on %[2]s_of_sizes referencing new table as inserted for each statement execute function ratelimit_guard('%[1]s', 'customer', 'size')`,
		policy, table), pgx.QueryExecModeSimpleProtocol)
}

// ForReadOnly defines what RequireReadOnly calls about: a policy, a quota and slots.
func (db *TestDB) ForReadOnly(policy string, durability PolicyOption) {
	db.Policy(policy, 10, 1, time.Hour, durability).Take(policy, "known", 3, "i1")
	for name, kind := range map[string]string{policy + " quota": "period => '1 day'", policy + " slots": "lease => '1 day'"} {
		db.Execute("select ratelimit_define_policy($1, 10, durable => p.durable, "+kind+") from ratelimit_policies() as p where p.policy = $2", name, policy)
	}
	db.Take(policy+" quota", "known", 3, "i1").Execute("select ratelimit_hold($1, 'known', 'h')", policy+" slots")
}

// RequireReadOnly calls all that writes, where nothing can be written. Where a standby cannot read the policy either, that is said.
func RequireReadOnly(t *testing.T, conn *pgx.Conn, policy, detail string, unreadable bool) {
	require.Empty(t, slices.DeleteFunc(ColumnOf(t, conn, "select distinct substr(p.proname, 11) from "+PackageFunctions+" as p where p.proname ~ '^ratelimit_'"),
		func(name string) bool { _, known := Functions[name]; return known }), "functions that the call table lacks")
	writes := []string{"25006", "cannot write in a read-only transaction", detail,
		"Call it on the primary, in a read-write transaction. ratelimit_peek works here, on a standby for durable policies."}
	kinds := map[string][]string{"anything": {""}, "tokens": {"", " quota"}, "slots": {" slots"}, "tokens slots": {"", " quota", " slots"}}
	for name, f := range Functions {
		of := kinds[f.Writes]
		readsKey := strings.HasPrefix(f.Arguments, "policy") && !slices.Contains([]string{"overrides", "usage", "http_fields"}, name)
		if f.Writes == "" && readsKey && unreadable {
			of = []string{map[bool]string{true: " slots"}[name == "holders"]}
		}
		for _, kind := range of {
			for _, key := range []string{"known", "new"} {
				if name == "pause" && kind != "" || key == "new" && !createsRow(name, f) {
					continue
				}
				samples := f.Samples(name)[0]
				if name == "settle_all" {
					samples = strings.Replace(samples, "KEY.", "KEY", 1) // the key that has a grant, twice
				}
				call := strings.NewReplacer("'p'", "'"+policy+kind+"'", "{p,p}", `{"`+policy+kind+`","`+policy+kind+`"}`, "KEY", key).Replace(samples)
				if f.Writes == "" {
					call = strings.Replace(call, "(null", "('"+policy+kind+"'", 1)
				}
				_, err := conn.Exec(t.Context(), call, pgx.QueryExecModeSimpleProtocol)
				e := PgError(err)
				require.NotNil(t, e, "%s: %v", call, err)
				got := []string{e.Code, e.Message, e.Detail, e.Hint}
				if unreadable && e.Code == "0A000" {
					require.Equal(t, []string{"0A000", "ephemeral buckets cannot be read on a standby",
						"Policy '" + policy + kind + "' is ephemeral. This server is a standby.", "Ask the primary."}, got, call)
					continue
				}
				require.Equal(t, writes, got, call)
				require.NotRegexp(t, `(?i)"(with|update|insert|delete|lock)|\sfrom\s`, e.Where, call)
			}
		}
	}
}

// createsRow reports whether a function writes about a key that has no row.
func createsRow(name string, f Function) bool {
	return name != "refund" && !strings.HasPrefix(name, "settle") && slices.ContainsFunc(f.List(), func(a Argument) bool {
		return slices.Contains([]string{"cost", "charge", "slots", "at_most", "pause_for"}, a.Kind)
	})
}

func All(policy string, keys ...string) (r WholeRequest) {
	for _, key := range keys {
		r.Charges = append(r.Charges, ChargeOf(policy, key, 1))
	}
	return r
}

func (s *Session) StartAll(r WholeRequest) *Pending {
	return s.Start(func(q Querier) (Decision, error) {
		w, err := r.AcquireAll(q)
		return w.Decision, err
	})
}

func Connect(t *testing.T, server *pgtest.Server) *pgx.Conn {
	conn := NoError(pgx.Connect(t.Context(), server.URL("")))(t)
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// The places of the durable twin that mutations change.
const (
	ReadKey   = `v_first := k from idempotency_keys as k [^;]*;`
	Replay    = ` then return answer_again\(v_first, v_cost, v_now, v_policy\.shadow\); end if;`
	FindKey   = ReadKey + ` if v_first\.expires_at > v_now` + Replay
	FirstLook = ReadKey + ` if v_first\.expires_at > v_now then if [^;]*; end if; return answer_again\([^;]*; end if; exit plain`
	AfterLook = `update buckets as b set level = least\(v_policy\.rate_full`
	FindAgain = ReadKey + ` end if; if v_first\.expires_at > v_now then return answer_again\([^;]*;`
	Denies    = ` elsif [^;]*;[^;]*; end if; end if; return denied_by_rate`
	ReadAgain = FindAgain + Denies
	GiveBack  = `update buckets as b set level = b\.level \+ microtokens\(v_cost\) [^;]*;`
	StillFits = `(update buckets as b [^;]* b\.key = v_key collate "C") and [^;]* >= microtokens\(v_cost\) - b\.level returning`
	WhenGone  = `(insert into buckets [^;]*) on conflict on constraint buckets_pkey do nothing`
	Overwrite = `if v_first\.expires_at > v_now( then update buckets as b set level = b\.level \+ [^;]*; return [^;]*; end if; delete [^;]*) and k\.expires_at <= v_now;`
	NotFitted = `v_now := clock\(\); select [^;]* from buckets as b`
)

type Deleted struct{ Buckets, Keys int64 }

func (db *TestDB) CleanupAt(at time.Time) Deleted {
	db.SetClock(at)
	return db.Cleanup()
}

func (db *TestDB) Cleanup() Deleted { return db.Swept(db.Pool, 10_000) }

// CleanUpAtOnce makes clean-up judge rows as of now and not of five minutes ago, for tests that are about something else.
func (db *TestDB) CleanUpAtOnce() *TestDB {
	for _, function := range db.Strings(`select oid::regproc::text from pg_proc where proname = 'cleanup_batch' and prosrc ~ '5 minutes'`) { // Citus has several
		db.Mutate(Mutation{`interval '5 minutes'`, "interval '0'"}, function)
	}
	return db
}

func Cleanup(q Querier, maxRows int) (d Deleted, err error) {
	err = q.QueryRow(context.Background(),
		"select buckets_deleted, idempotency_keys_deleted from ratelimit_cleanup($1)", maxRows).Scan(&d.Buckets, &d.Keys)
	return d, err
}

// Swept is what one batch deletes, which must not fail.
func (db *TestDB) Swept(q Querier, maxRows int) Deleted {
	return NoError(Cleanup(q, maxRows))(db.T)
}

// GoesOn runs one batch of ratelimit_cleanup_all, and tells whether another is to follow.
func (db *TestDB) GoesOn(maxRows int) (more bool) {
	require.NoError(db.T, db.Pool.QueryRow(context.Background(),
		"select more from ratelimit.cleanup_batch($1, '1 hour', null, null)", maxRows).Scan(&more))
	return more
}

// FillTables gives a policy n buckets that are full by now and n idempotency keys past their time.
func (db *TestDB) FillTables(prefix, policy string, n int) {
	db.Execute("insert into ratelimit."+prefix+`buckets (policy_id, key, level, refilled_at, due_at)
		select p.id, 'k' || i, 0, clock_timestamp() - interval '1 year', clock_timestamp() - interval '1 day'
		  from ratelimit.policies as p, generate_series(1, $2::integer) as i where p.name = $1`, policy, n)
	db.Execute("insert into ratelimit."+prefix+`idempotency_keys
		       (policy_id, key, idempotency_key, cost, remaining, capacity, reset_after, expires_at)
		select p.id, 'k' || i, 'X', 1, 1, 1, '0', clock_timestamp() - interval '1 day'
		  from ratelimit.policies as p, generate_series(1, $2::integer) as i where p.name = $1`, policy, n)
}

func (db *TestDB) Orphans() (n int64) {
	for _, table := range StateTables {
		n += db.Number("select count(*) from " + table + " where policy_id not in (select id from ratelimit.policies)")
	}
	return n
}

// Findings are those of the doctor, each with its severity.
func (db *TestDB) Findings() []string {
	return Column(db.T, db.DB, "select severity || ': ' || finding from ratelimit_doctor()")
}

// RequireFinding fails unless the doctor finds just this, and returns what helps.
func (db *TestDB) RequireFinding(severity string, parts ...string) (remedy string) {
	findings := db.Findings()
	require.Len(db.T, findings, 1)
	for _, part := range append(parts, severity+": ") {
		require.Contains(db.T, findings[0], part)
	}
	return Column(db.T, db.DB, "select remedy from ratelimit_doctor()")[0]
}

// GiveAway makes a role that is no superuser the owner of the package, so that the doctor has nothing to say of the owner.
func (db *TestDB) GiveAway() *TestDB {
	db.Follow(db.RequireFinding("notice", "The owner of the package, ", " is a superuser"), "pg_monitor")
	require.Empty(db.T, db.Findings())
	return db
}

// Follow executes the statements of a remedy, for a new owner where the remedy leaves it open.
func (db *TestDB) Follow(remedy, owner string) {
	_, sql, found := strings.Cut(remedy, "\n")
	require.True(db.T, found, remedy)
	conn := db.Connect(db.T)
	Execute(db.T, conn, strings.ReplaceAll(sql, "'new_owner'", "'"+owner+"'"), pgx.QueryExecModeSimpleProtocol)
	require.NoError(db.T, conn.Close(context.Background()))
}

// RequireNoLeak waits until only the goroutines of before are left, and looks once: a call that is tried again is a timer between two tries.
func RequireNoLeak(t *testing.T, before goleak.Option) {
	left := goleak.Find(before)
	for began := time.Now(); left != nil && time.Since(began) < time.Minute; {
		left = goleak.Find(before) // which pauses
	}
	require.NoError(t, left)
}

func (db *TestDB) AMinuteAfter(sql string, args ...any) time.Time {
	return One[time.Time](db.T, db.Pool, sql, args...).Add(time.Minute)
}
