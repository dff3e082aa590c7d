package server_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/server"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// newShards are databases with the policies of newDB, which are numbered, and the setting that lists them.
func newShards(t testing.TB, of int) (dbs []*pgtest.DB, setting string) {
	t.Helper()
	var urls []string
	for n := range of {
		db := newDB(t)
		db.Exec(t, "select ratelimit_define_shard($1, $2)", n, of)
		dbs, urls = append(dbs, db), append(urls, db.URL)
	}
	return dbs, "SHARD_URLS=" + strings.Join(urls, "\n")
}

func keyOn(shard, of int) string {
	for i := 0; ; i++ {
		if key := fmt.Sprint("user:", i); client.ShardOf(key, of) == shard {
			return key
		}
	}
}

func (s *testServer) ask(path, body string) answer {
	s.t.Helper()
	a, err := s.post(s.t.Context(), path, body)
	require.NoError(s.t, err)
	return a
}

func TestShards_EachCallGoesToTheShardOfItsKey(t *testing.T) {
	t.Parallel()
	const of = 4
	dbs, setting := newShards(t, of)
	s := start(t, "", setting, "DEFAULT_CAPACITY=5", "DEFAULT_REFILL_RATE=0")
	for n, db := range dbs {
		key := keyOn(n, of)
		a := s.ask("/v1/acquire", `{"policy":"api","key":"`+key+`","cost":3}`)
		require.Equal(t, http.StatusOK, a.status, "%+v", a)
		a = s.ask("/v1/acquire_all", `{"charges":[{"policy":"api","key":"`+key+`"},{"policy":"budget","key":"`+key+`"}]}`)
		require.Equal(t, http.StatusOK, a.status)
		require.Equal(t, http.StatusOK, s.ask("/v1/acquire", `{"key":"`+key+`"}`).status, "the policy default is everywhere")
		db.Await(t, time.Minute, "select (ratelimit_peek('api', $1)).remaining = 6 and (ratelimit_peek('default', $1)).remaining = 4", key)
	}
	a := s.ask("/v1/acquire_all", `{"charges":[{"policy":"api","key":"`+keyOn(0, of)+`"},{"policy":"api","key":"`+keyOn(1, of)+`"}]}`)
	requireProblem(t, a, http.StatusUnprocessableEntity, "22023")
	require.Contains(t, a.body["detail"], "charge 0 to shard 0 and charge 1 to shard 1 of 4")
}

func TestShards_MistakesAreSeenAtTheStart(t *testing.T) {
	t.Parallel()
	dbs, _ := newShards(t, 4)
	bare := pgtest.New(t)
	list := func(dbs ...*pgtest.DB) string {
		var urls []string
		for _, db := range dbs {
			urls = append(urls, db.URL)
		}
		return "SHARD_URLS=" + strings.Join(urls, " ")
	}
	for name, test := range map[string]struct{ setting, says string }{
		"swapped":    {list(dbs[0], dbs[2], dbs[1], dbs[3]), "shard 1 of 4: "},
		"too few":    {list(dbs[0], dbs[1]), "List all 4 databases"},
		"one":        {list(dbs[0]), "List all 4 databases"},
		"unnumbered": {list(dbs[0], dbs[1], dbs[2], bare), "select ratelimit_define_shard(3, 4);"},
	} {
		_, err := server.Start(t.Context(), load(t, "", test.setting), slog.New(slog.DiscardHandler))
		require.ErrorIs(t, err, client.ErrWrongShard, name)
		require.ErrorContains(t, err, test.says, name)
	}
}

// One URL of several would have full buckets for the keys of the others.
func TestShards_OneAloneIsRefused(t *testing.T) {
	t.Parallel()
	dbs, _ := newShards(t, 2)
	err := startError(t, dbs[1].URL)
	require.ErrorIs(t, err, client.ErrWrongShard)
	require.ErrorContains(t, err, "is shard 1 of 2")
	require.ErrorContains(t, err, "List all 2 databases, in SHARD_URLS")

	db := newDB(t)
	role := newRole(t, db)
	db.Exec(t, "grant execute on function ratelimit_acquire, ratelimit_acquire_all, ratelimit_acquire_packed to "+role)
	s := start(t, as(t, db, role)) // which may not ask
	require.Equal(t, http.StatusOK, s.ask("/v1/acquire", `{"policy":"api","key":"k"}`).status)
}

// A shard that is down fails its own calls. The server starts beside it, is healthy, and answers all others.
func TestShards_OneIsDown(t *testing.T) {
	t.Parallel()
	rules := filepath.Join(t.TempDir(), "rules.yaml")
	require.NoError(t, os.WriteFile(rules, []byte("{domain: edge, descriptors: [{key: user, rate_limit: {unit: day, requests_per_unit: 5}}]}"), 0o600))
	dbs, _ := newShards(t, 2)
	setting := "SHARD_URLS=" + dbs[0].URL + " postgres://127.0.0.1:1/nowhere"
	s := start(t, "", setting, "MAX_CALLS=2", "CALL_TIMEOUT=5s", "ENVOY_RULES="+rules)
	require.Contains(t, s.log.String(), "a shard is left out")
	well, down := keyOn(0, 2), keyOn(1, 2)
	for range 3 {
		requireProblem(t, s.ask("/v1/acquire", `{"policy":"api","key":"`+down+`"}`), http.StatusServiceUnavailable, "")
		require.Equal(t, http.StatusOK, s.ask("/v1/acquire", `{"policy":"api","key":"`+well+`"}`).status)
	}
	require.Eventually(t, func() bool { return strings.Contains(s.log.String(), "a shard is not healthy") }, time.Minute, 10*time.Millisecond)
	require.Eventually(t, func() bool { return s.get("/healthz").status == http.StatusOK }, time.Minute, 10*time.Millisecond)

	_, err := server.Start(context.Background(), load(t, "", "SHARD_URLS=postgres://127.0.0.1:1/a postgres://127.0.0.1:1/b"), slog.New(slog.DiscardHandler))
	require.ErrorContains(t, err, "the database does not answer")
	require.ErrorContains(t, err, "shard 1 of 2: ")
}
