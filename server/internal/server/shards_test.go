package server_test

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// newShards are databases with the policies of newDB, which are numbered, and the setting that lists them.
func newShards(t testing.TB, of int) (dbs []*pgtest.DB, setting string) {
	var urls []string
	for n := range of {
		db := newDB(t)
		db.Exec(t, "select ratelimit_define_shard($1, $2)", n, of)
		dbs, urls = append(dbs, db), append(urls, db.URL)
	}
	return dbs, "SHARD_URLS=" + strings.Join(urls, "\n")
}

func keyOn(shard, of int) string { return kit.KeyOf(shard, of, "user:") }

func TestShards_EachCallGoesToTheShardOfItsKey(t *testing.T) {
	t.Parallel()
	const of = 4
	dbs, setting := newShards(t, of)
	s := start(t, "", setting, "DEFAULT_CAPACITY=5", "DEFAULT_REFILL_RATE=0")
	for n, db := range dbs {
		key := keyOn(n, of)
		a := s.mustPost("/v1/acquire", `{"policy":"api","key":"`+key+`","cost":3}`)
		require.Equal(t, http.StatusOK, a.status, "%+v", a)
		a = s.mustPost("/v1/acquire_all", `{"charges":[{"policy":"api","key":"`+key+`"},{"policy":"budget","key":"`+key+`"}]}`)
		require.Equal(t, http.StatusOK, a.status)
		require.Equal(t, http.StatusOK, s.mustPost("/v1/acquire", `{"key":"`+key+`"}`).status, "the policy default is everywhere")
		holder := `{"policy":"jobs","key":"` + key + `","holder":"h"}`
		require.Equal(t, true, s.mustPost("/v1/hold", holder).body["allowed"])
		db.Await(t, time.Minute, "select count(*) = 1 from ratelimit_holders('jobs', $1)", key)
		require.EqualValues(t, 60, s.mustPost("/v1/renew", holder).body["held_for"])
		require.Equal(t, true, s.mustPost("/v1/release", holder).body["released"])
		db.Await(t, time.Minute, "select (ratelimit_peek('api', $1)).remaining = 6 and (ratelimit_peek('default', $1)).remaining = 4", key)
	}
	a := s.mustPost("/v1/acquire_all", `{"charges":[{"policy":"api","key":"`+keyOn(0, of)+`"},{"policy":"api","key":"`+keyOn(1, of)+`"}]}`)
	requireProblem(t, a, http.StatusUnprocessableEntity, "22023")
	require.Contains(t, a.body["detail"], "charge 0 to shard 0 and charge 1 to shard 1 of 4")
	a = s.mustPost("/v1/settle_all", `{"settlements":[{"policy":"api","key":"`+keyOn(0, of)+`","cost":1},{"policy":"api","key":"`+keyOn(1, of)+`","cost":1}],"idempotency_key":"i"}`)
	requireProblem(t, a, http.StatusUnprocessableEntity, "22023")
}

// tests/client has every mistake in a list. With one URL of several, the keys of the other shards would have full buckets.
func TestShards_MistakesAreSeenAtTheStart(t *testing.T) {
	t.Parallel()
	dbs, _ := newShards(t, 2)
	for setting, says := range map[string]string{
		"SHARD_URLS=" + dbs[1].URL + " " + dbs[0].URL: "shard 1 of 2: ",
		"SHARD_URLS=" + dbs[0].URL:                    "List all 2 databases",
		"DATABASE_URL=" + dbs[1].URL:                  "would be full here. List all 2 databases, in SHARD_URLS",
	} {
		err := startError(t, "", setting)
		require.ErrorIs(t, err, client.ErrWrongShard, says)
		require.ErrorContains(t, err, says)
	}
	_, _, url := newRole(t, "ratelimit_acquire, ratelimit_acquire_all, ratelimit_acquire_packed")
	s := start(t, url) // which may not ask
	require.Equal(t, http.StatusOK, s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`).status)
}

// Only calls to the shard that is down fail. The server starts, is healthy, and answers the others. The page has the state of each.
func TestShards_OneIsDown(t *testing.T) {
	t.Parallel()
	rules := kit.File(t, "rules.yaml", "{domain: edge, descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 5}}]}")
	dbs, _ := newShards(t, 2)
	setting := "SHARD_URLS=" + dbs[0].URL + " postgres://127.0.0.1:1/nowhere"
	s := start(t, "", setting, "MAX_CALLS=2", "STATUS_PAGE=true", "ENVOY_RULES="+rules)
	require.Contains(t, s.log.String(), "a shard is left out")
	well, down := keyOn(0, 2), keyOn(1, 2)
	for range 3 {
		requireProblem(t, s.mustPost("/v1/acquire", `{"policy":"api","key":"`+down+`"}`), http.StatusServiceUnavailable, "")
		require.Equal(t, http.StatusOK, s.mustPost("/v1/acquire", `{"policy":"api","key":"`+well+`","cost":2}`).status)
	}
	require.Regexp(t, `"call failed".*shard 1 of 2: `, s.log.String())
	require.Eventually(t, func() bool { return strings.Contains(s.log.String(), "a shard is not healthy") }, time.Minute, 10*time.Millisecond)
	require.Eventually(t, func() bool { return s.get("/healthz").status == http.StatusOK }, time.Minute, 10*time.Millisecond)
	var page string
	require.Eventually(t, func() bool {
		page = s.get("/?refresh=on").text
		return strings.Contains(page, "Not healthy: shard 1 of 2 is down.") && strings.Contains(page, well)
	}, time.Minute, 50*time.Millisecond)
	require.Regexp(t, `<tr><td><bdi>0</bdi></td><td><bdi>`+dbs[0].Pool.Config().ConnConfig.Host+`:\d+/\w+</bdi></td><td><bdi>up<`, page)
	require.Contains(t, page, "<tr><td><bdi>1</bdi></td><td><bdi>127.0.0.1:1/nowhere</bdi></td><td><bdi>down<")

	err := startError(t, "", "SHARD_URLS=postgres://127.0.0.1:1/a postgres://127.0.0.1:1/b")
	require.ErrorContains(t, err, "the database does not answer")
	require.ErrorContains(t, err, "shard 1 of 2: ")
}

const busy = "select ratelimit_define_policy('busy', 1000000, 1, '1 day')"

// spend has callers ask until enough requests were granted in advance. It returns how many were granted, and how many of them were marked.
func (s *testServer) spend(key string, enough int64) (granted, prefetched int64) {
	s.t.Helper()
	var all, marked atomic.Int64
	var callers sync.WaitGroup
	for caller := range 8 {
		callers.Go(func() {
			for ; marked.Load() < enough && all.Load() < 100_000; all.Add(1) {
				allowed, isMarked, err := s.take(s.t.Context(), caller, "busy", key)
				if err != nil || !allowed {
					s.t.Errorf("allowed %t, error %v", allowed, err)
					return
				}
				if isMarked {
					marked.Add(1)
				}
			}
		})
	}
	callers.Wait()
	require.GreaterOrEqual(s.t, marked.Load(), enough)
	return all.Load(), marked.Load()
}

func spent(t *testing.T, db *pgtest.DB, key string) int64 {
	return kit.One[int64](t, db.Pool, "select 1000000 - (ratelimit_peek('busy', $1)).remaining", key)
}

// The answer, the metrics and the page show grants in advance. Other calls go to the database. A server that stops refunds its stocks.
func TestPrefetch_AnswersForBusyBuckets(t *testing.T) {
	db := parallelDB(t)
	db.Exec(t, busy)
	s := start(t, db.URL, "PREFETCH=api, busy=0.01, later", "STATUS_PAGE=true")
	require.Contains(t, s.log.String(), "PREFETCH names a policy that is not there yet\" policy=later")
	granted, prefetched := s.spend("k", 500)

	for n := range 5 {
		keyed := fmt.Sprintf(`{"policy":"busy","key":"k","idempotency_key":"%d"`, n)
		require.NotContains(t, s.mustPost("/v1/acquire", keyed+"}").body, "estimated")
		require.Equal(t, true, s.mustPost("/v1/acquire", keyed+"}").body["replayed"])
		require.NotContains(t, s.mustPost("/v1/settle", keyed+`,"cost":3}`).body, "estimated")
		require.NotContains(t, s.mustPost("/v1/acquire_all", `{"charges":[{"policy":"busy","key":"k"}]}`).text, "estimated")
		require.NotContains(t, s.mustPost("/v1/peek", `{"policy":"busy","key":"k"}`).body, "estimated")
		granted += 3 + 1
	}
	require.Contains(t, s.get("/metrics").text, fmt.Sprintf("ratelimit_prefetched_total{policy=\"busy\"} %d\n", prefetched))
	require.Regexp(t, `Granted in advance</dt><dd>[1-9]`, s.get("/?refresh=on").text)
	more, _ := s.spend("k", 100) // so that it holds some
	require.NoError(t, s.stop())
	require.Equal(t, granted+more, spent(t, db, "k"))
}

func TestPrefetch_OfShards(t *testing.T) {
	t.Parallel()
	dbs, setting := newShards(t, 2)
	for _, db := range dbs {
		db.Exec(t, busy)
	}
	s := start(t, "", setting, "PREFETCH=busy")
	var granted [2]int64
	for n := range dbs {
		granted[n], _ = s.spend(keyOn(n, 2), 100)
	}
	require.NoError(t, s.stop())
	for n, db := range dbs {
		require.Equal(t, granted[n], spent(t, db, keyOn(n, 2)))
	}
}

func TestPrefetch_NeedsGrants(t *testing.T) {
	t.Parallel()
	db, role, url := newRole(t, "ratelimit_acquire, ratelimit_acquire_all, ratelimit_acquire_packed, ratelimit_charge, ratelimit_settle, ratelimit_peek, ratelimit_refund")
	require.ErrorContains(t, startError(t, url, "PREFETCH=api"), "grant execute on function ratelimit_acquire_up_to, ratelimit_refund to <role>;")
	db.Exec(t, "grant execute on function ratelimit_acquire_up_to to "+role)
	start(t, url, "PREFETCH=api")
}
