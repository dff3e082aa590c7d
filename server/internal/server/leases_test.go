package server_test

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/server"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

const busy = "select ratelimit_define_policy('busy', 1000000, 1, '1 day')"

// spend has callers ask until enough of their requests were answered from a lease, and returns how many were granted, and how
// many of these were marked.
func (s *testServer) spend(key string, enough int64) (granted, leased int64) {
	s.t.Helper()
	var all, marked atomic.Int64
	var callers sync.WaitGroup
	for caller := range 8 {
		callers.Go(func() {
			for ; marked.Load() < enough && all.Load() < 100_000; all.Add(1) {
				var isMarked bool
				if caller%2 == 0 {
					d, err := s.rpc.Acquire(s.t.Context(), &pb.AcquireRequest{Policy: "busy", LogicalKey: key})
					if err != nil || d.GetVerdict() != pb.Verdict_ALLOWED {
						s.t.Errorf("%v: %v", d, err)
						return
					}
					isMarked = d.GetEstimated()
				} else {
					a, err := s.post(s.t.Context(), "/v1/acquire", `{"policy":"busy","key":"`+key+`"}`)
					if err != nil || a.body["allowed"] != true {
						s.t.Errorf("%v: %v", a, err)
						return
					}
					_, isMarked = a.body["estimated"]
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

// text is what a browser would show.
func (s *testServer) text(path string) string {
	s.t.Helper()
	response, err := s.http.Get(s.url + path)
	require.NoError(s.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(s.t, err)
	require.Equal(s.t, http.StatusOK, response.StatusCode)
	return string(body)
}

func spent(t *testing.T, db *pgtest.DB, key string) (tokens int64) {
	t.Helper()
	require.NoError(t, db.Pool.QueryRow(t.Context(), "select 1000000 - (ratelimit_peek('busy', $1)).remaining", key).Scan(&tokens))
	return tokens
}

// A busy bucket is answered from a lease, which the answer, the metrics and the page say. What only the database can answer, it
// does. When the server stops, it gives back what is left.
func TestLeases_AnswerForBusyBuckets(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, busy)
	s := start(t, db.URL, "LEASES=api, busy=0.01, later", "STATUS_PAGE=true")
	require.Contains(t, s.log.String(), "LEASES names a policy that is not there yet\" policy=later")
	granted, leased := s.spend("k", 500)

	for n := range 5 {
		id := fmt.Sprint(n)
		d, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "busy", LogicalKey: "k", RequestId: &id})
		require.NoError(t, err)
		require.False(t, d.GetEstimated())
		again, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "busy", LogicalKey: "k", RequestId: &id})
		require.NoError(t, err)
		require.True(t, again.GetReplayed())
		d, err = s.rpc.Settle(t.Context(), &pb.SettleRequest{Policy: "busy", LogicalKey: "k", RequestId: &id, Cost: ptr(int64(3))})
		require.NoError(t, err)
		require.False(t, d.GetEstimated())
		all, err := s.rpc.AcquireAll(t.Context(), &pb.AcquireAllRequest{Charges: []*pb.Charge{{Policy: "busy", LogicalKey: "k"}}})
		require.NoError(t, err)
		require.False(t, all.GetWhole().GetEstimated() || all.GetDecisions()[0].GetEstimated())
		granted += 3 + 1
		require.NotContains(t, s.mustPost("/v1/peek", `{"policy":"busy","key":"k"}`).body, "estimated")
	}
	require.Contains(t, s.text("/metrics"), fmt.Sprintf("ratelimit_leased_total{policy=\"busy\"} %d\n", leased))
	require.Regexp(t, `Granted from leases</dt><dd>[1-9]`, s.text("/"))
	more, _ := s.spend("k", 100) // so that it holds some
	require.NoError(t, s.stop())
	require.Equal(t, granted+more, spent(t, db, "k"))
}

// Each shard has leases of its own keys.
func TestLeases_OfShards(t *testing.T) {
	t.Parallel()
	dbs, setting := newShards(t, 2)
	for _, db := range dbs {
		db.Exec(t, busy)
	}
	s := start(t, "", setting, "LEASES=busy")
	var granted [2]int64
	for n := range dbs {
		granted[n], _ = s.spend(keyOn(n, 2), 100)
	}
	require.NoError(t, s.stop())
	for n, db := range dbs {
		require.Equal(t, granted[n], spent(t, db, keyOn(n, 2)))
	}
}

// Without the grants that leases need a server would lease nothing, and say nothing: so it does not start.
func TestLeases_NeedGrants(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	role := newRole(t, db)
	const others = "ratelimit_acquire, ratelimit_acquire_all, ratelimit_acquire_packed, ratelimit_charge, ratelimit_settle, ratelimit_peek, ratelimit_refund"
	db.Exec(t, "grant execute on function "+others+" to "+role)
	_, err := server.Start(t.Context(), load(t, as(t, db, role), "LEASES=api"), slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "grant execute on function ratelimit_acquire_up_to, ratelimit_refund to <role>;")
	db.Exec(t, "grant execute on function ratelimit_acquire_up_to to "+role)
	start(t, as(t, db, role), "LEASES=api")
}

// No client of a server that leases nothing sees anything of it.
func TestLeases_AreOffUnlessAskedFor(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	db.Exec(t, busy)
	s := start(t, db.URL, "STATUS_PAGE=true")
	for range 100 {
		require.NotContains(t, s.mustPost("/v1/acquire", `{"policy":"busy","key":"k"}`).body, "estimated")
	}
	require.NotContains(t, s.text("/metrics"), "ratelimit_leased")
	require.NotContains(t, s.text("/"), "leases")
	require.EqualValues(t, 100, spent(t, db, "k"))
}
