package client_test

import (
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// nobody is a pool of a role that may do nothing, and the quoted name of the role.
func nobody(t *testing.T, db *pgtest.DB) (client.Pool, string) {
	name := "nobody of " + db.Name
	role := pgx.Identifier{name}.Sanitize()
	db.Exec(t, "create role "+role)
	t.Cleanup(func() { db.Exec(t, "drop owned by "+role+"; drop role "+role) })
	return connect(t, db, map[string]string{"role": name}), role
}

func lacks(t *testing.T, err error) []string {
	if err == nil {
		return nil
	}
	lacking, ok := errors.AsType[*client.NotReadyError](err)
	require.True(t, ok, "%v", err)
	return lacking.Lacks
}

// The statements help: with them the check finds nothing.
func TestCheck_ListsWhatCallsLack(t *testing.T) {
	t.Parallel()
	ctx, db := t.Context(), pgtest.New(t)
	pool, _ := nobody(t, db)
	combiner := client.NewCombiner(pool)
	t.Cleanup(combiner.Close)

	require.Len(t, lacks(t, client.New(pool).Check(ctx, client.Needs{})), 2)
	require.Len(t, lacks(t, client.New(pool).Check(ctx, client.Needs{Calls: []string{"Hold", "AcquireUpTo"}})), 4)
	unknown := lacks(t, client.New(pool).Check(ctx, client.Needs{Calls: []string{"AcquireOne"}}))
	require.Equal(t, []string{"ratelimit_acquire_one is missing: bring pgratelimit up to date, or correct Calls"}, unknown)
	missing := lacks(t, combiner.Check(ctx, client.Needs{}))
	require.Len(t, missing, 3)
	for _, statement := range missing {
		require.Regexp(t, `^grant execute on function public\.ratelimit_acquire`, statement)
		db.Exec(t, statement)
	}
	require.NoError(t, combiner.Check(ctx, client.Needs{}))
	both := lacks(t, combiner.Check(ctx, client.Needs{Calls: []string{"Acquire", "Refund"}, Policies: []string{"misspelt"}}))
	require.Len(t, both, 2)
	require.Contains(t, both[0], "ratelimit_refund")
	require.Contains(t, both[1], `no policy is named "misspelt"`)
	require.Equal(t, []string{`pgratelimit is not installed in schema "none" of this database: run migrations/psql/install.sql`},
		lacks(t, client.New(pool, client.Schema("none")).Check(ctx, client.Needs{})))
	elsewhere := connect(t, db, map[string]string{"search_path": "ratelimit"})
	hidden := lacks(t, client.New(elsewhere).Check(ctx, client.Needs{}))
	require.Regexp(t, `^ratelimit_acquire is in schema public, which is not on search_path`, hidden[0])
	require.NoError(t, client.New(elsewhere, client.Schema("public")).Check(ctx, client.Needs{}))

	db.Exec(t, "select ratelimit_define_policy('api', 5, 1, '1 hour'), ratelimit_define_policy('jobs', 5, lease => '1 hour')")
	limiter := client.New(connect(t, db, nil))
	require.Equal(t, []string{
		`no policy is named "misspelt": see the names in ratelimit_policies(), or define it`, `the policy "jobs" lends slots: call Hold`,
	}, lacks(t, limiter.Check(ctx, client.Needs{Policies: []string{"misspelt", "api", "jobs"}})))
	require.Equal(t, []string{`the policy "api" lends no slots: define it with a lease, or call Acquire`},
		lacks(t, limiter.Check(ctx, client.Needs{Calls: []string{"Hold", "Release"}, Policies: []string{"jobs", "api"}})))
	require.Empty(t, lacks(t, limiter.Check(ctx, client.Needs{Calls: []string{"Peek", "HoldWait"}, Policies: []string{"jobs", "api"}})), "of either kind")
}

// The functions of each method are there, so a name is found for each.
func TestCheck_KnowsAllMethods(t *testing.T) {
	t.Parallel()
	var calls []string
	for method := range reflect.TypeFor[*client.Combiner]().Methods() {
		if !slices.Contains([]string{"Check", "Close", "Waiting", "WithTx"}, method.Name) {
			calls = append(calls, method.Name)
		}
	}
	require.Greater(t, len(calls), 20)
	require.Empty(t, lacks(t, client.New(connect(t, pgtest.New(t), nil)).Check(t.Context(), client.Needs{Calls: calls})))
}

// What a Prefetcher and a Sharded send besides is checked, too.
func TestCheck_OfStocksAndShards(t *testing.T) {
	t.Parallel()
	ctx, db := t.Context(), pgtest.New(t)
	pool, role := nobody(t, db)
	db.Exec(t, "select ratelimit_define_shard(0, 1); grant execute on function ratelimit_shard to "+role, pgx.QueryExecModeSimpleProtocol)
	prefetcher := client.NewPrefetcher(pool, client.Prefetch{Policy: "api"})
	t.Cleanup(prefetcher.Close)
	require.Len(t, lacks(t, prefetcher.Check(ctx, client.Needs{})), 5)
	sharded, err := client.NewSharded(ctx, []client.Pool{pool})
	require.NoError(t, err)
	t.Cleanup(sharded.Close)
	db.Exec(t, "revoke execute on function ratelimit_shard from "+role)
	err = sharded.Check(ctx, client.Needs{})
	require.Len(t, lacks(t, err), 4)
	require.ErrorContains(t, err, "pgratelimit: shard 0 of 1: ")
}

// logOf is what the default logger gets from now on.
func logOf(t *testing.T) func() string {
	file := kit.NoError(os.Create(filepath.Join(t.TempDir(), "log")))(t)
	t.Cleanup(func() { require.NoError(t, file.Close()) })
	previous := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(file, nil)))
	t.Cleanup(func() { slog.SetDefault(previous) })
	return func() string { return string(kit.NoError(os.ReadFile(file.Name()))(t)) }
}

// Not parallel: the default logger belongs to the process.
func TestMiddleware_IsHeardAboutWhatIsWrongFromTheStart(t *testing.T) {
	db := pgtest.New(t)
	pool, role := nobody(t, db)
	owner := connect(t, db, nil)
	db.Exec(t, "select ratelimit_define_policy('api', 5, 1, '1 hour')")
	get := func(limiter client.Acquirer, charge client.Charge, key httplimit.Key) int {
		charges := func(r *http.Request) []client.Charge { charge.Key = key(r); return []client.Charge{charge} }
		handler := httplimit.New(limiter, charges, httplimit.Open(time.Minute))(http.NotFoundHandler())
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		r.Header.Set("X-Forwarded-For", "192.0.2.1")
		w := httptest.NewRecorder()
		for range 2 {
			w = httptest.NewRecorder()
			handler.ServeHTTP(w, r)
		}
		return w.Code
	}
	api := client.Charge{Policy: "api"}
	log := logOf(t)
	require.Equal(t, http.StatusTooManyRequests, get(client.New(owner), client.Charge{Policy: "api", Cost: client.Cost(6)}, httplimit.ByIP(0)))
	require.Equal(t, 1, strings.Count(log(), "ByIP trusts no proxy"), log())
	require.Equal(t, 1, strings.Count(log(), "more tokens than the capacity is never allowed"), log())

	db.Exec(t, "grant execute on function ratelimit_acquire to "+role)
	log = logOf(t)
	require.Equal(t, http.StatusNotFound, get(client.New(pool), api, httplimit.ByIP(1)))
	require.Eventually(t, func() bool { return strings.Count(log(), "ratelimit_acquire_all") == 1 }, kit.Patience, 10*time.Millisecond)
}
