package server_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// page asks for the status page, with a token as the password unless there is none.
func (s *testServer) page(password string) (a answer, page string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url+"/", nil)
	require.NoError(s.t, err)
	if password != "" {
		r.SetBasicAuth("anybody", password)
	}
	response, err := s.http.Do(r)
	require.NoError(s.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(s.t, err)
	return answer{status: response.StatusCode, header: response.Header}, string(body)
}

func TestPage_IsOffUnlessAskedFor(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	requireProblem(t, start(t, db.URL).get("/"), http.StatusNotFound, "")
	s := start(t, db.URL, "TOKENS=secret")
	requireProblem(t, s.get("/"), http.StatusUnauthorized, "")
	a, _ := s.page("secret")
	require.Equal(t, http.StatusUnauthorized, a.status)
	require.Equal(t, []string{"Bearer"}, a.header.Values("WWW-Authenticate"))
}

// It needs the token that calls need, and not that of health and metrics. A browser's way to give it is good for the page
// alone: a browser would give it to calls that others have it make.
func TestPage_NeedsTheToken(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s := start(t, db.URL, "STATUS_PAGE=true", "TOKENS=secret,other", "MONITORING_TOKENS=watch")
	for password, want := range map[string]int{"": 401, "wrong": 401, "watch": 401, "secret": 200, "other": 200} {
		a, body := s.page(password)
		require.Equal(t, want, a.status, password)
		require.Equal(t, want == 200, strings.Contains(body, "Emptiest buckets"))
		if want == 401 {
			require.Equal(t, []string{`Basic realm="pgratelimit", charset="UTF-8"`, "Bearer"}, a.header.Values("WWW-Authenticate"))
		}
	}
	a, err := s.do(t.Context(), http.MethodGet, "/", nil, "Authorization: Bearer secret")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, a.status)

	basic := "Authorization: Basic YW55Ym9keTpzZWNyZXQ=" // anybody:secret
	requireProblem(t, s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`, basic), http.StatusUnauthorized, "")
	a, err = s.do(t.Context(), http.MethodGet, "/metrics", nil, basic)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, a.status)
	requireProblem(t, s.mustPost("/", "", "Authorization: Bearer secret"), http.StatusNotFound, "")
}

// The page of another site whose name leads here may not read it.
func TestPage_WithoutTokensIsUnderNoName(t *testing.T) {
	t.Parallel()
	s := start(t, newDB(t).URL, "STATUS_PAGE=true")
	a, _ := s.page("")
	require.Equal(t, http.StatusOK, a.status)
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+"/", nil)
	require.NoError(t, err)
	r.Host = "evil.example"
	response, err := s.http.Do(r)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusForbidden, response.StatusCode)
}

// What callers got is in the plots, and the page outlives the database.
func TestPage_WithAndWithoutTheDatabase(t *testing.T) {
	t.Parallel()
	postgres := pgtest.Private(t)
	db := install(t, postgres)
	s := start(t, db.URL, "STATUS_PAGE=true")
	for range 12 {
		s.mustPost("/v1/acquire", `{"policy":"api","key":"user:42"}`)
	}
	s.mustPost("/v1/peek", `{"policy":"api","key":"user:42"}`)
	var page string
	require.Eventually(t, func() bool { // a sample takes 5 seconds; what the page could not read in time it reads later
		_, page = s.page("")
		return strings.Contains(page, "Healthy") && strings.Contains(page, "user:42") && !strings.Contains(page, "Denied: 0 a second now, 0 at most")
	}, time.Minute, 50*time.Millisecond)
	require.NotContains(t, page, "Allowed: 0 a second now, 0 at most")
	require.Contains(t, page, "Errors: 0 a second now, 0 at most")

	require.NoError(t, postgres.Stop(t.Context(), true))
	require.Eventually(t, func() bool { return s.get("/healthz").status == http.StatusServiceUnavailable }, 20*time.Second, 10*time.Millisecond)
	a, page := s.page("")
	require.Equal(t, http.StatusOK, a.status)
	require.Contains(t, page, "Not healthy: the database cannot be used.")
	require.Contains(t, page, "user:42", "as it was seen last")
}

// The page of shards is that of all their databases, and says which is down. The others go on.
func TestPage_OfShardsSaysWhichIsDown(t *testing.T) {
	t.Parallel()
	dbs, _ := newShards(t, 2)
	s := start(t, "", "SHARD_URLS="+dbs[0].URL+" postgres://127.0.0.1:1/nowhere", "STATUS_PAGE=true")
	key := keyOn(0, 2)
	require.Equal(t, http.StatusOK, s.ask("/v1/acquire", `{"policy":"api","key":"`+key+`"}`).status)
	var page string
	require.Eventually(t, func() bool {
		_, page = s.page("")
		return strings.Contains(page, "shard 1 of 2 is down") && strings.Contains(page, key)
	}, time.Minute, 50*time.Millisecond)
	require.Contains(t, page, "Not healthy: shard 1 of 2 is down.")
	require.Contains(t, page, "<strong>0</strong> "+dbs[0].Pool.Config().ConnConfig.Host)
	require.Contains(t, page, `<li class="down"><strong>1</strong> 127.0.0.1:1/nowhere`)
	require.Equal(t, http.StatusOK, s.get("/healthz").status, "a balancer sends requests on")
}
