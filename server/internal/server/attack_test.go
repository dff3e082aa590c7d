package server_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// Calls and reflection need one of TOKENS; metrics and health, but not /livez, one of MONITORING_TOKENS if set. Package auth has the wrong tokens.
func TestTokens_WhichWayNeedsWhich(t *testing.T) {
	db := parallelDB(t)
	for _, monitoring := range []string{"", "\nMONITORING_TOKENS=watch"} {
		s := start(t, db.URL, strings.Split("TOKENS=first,second\nENVOY_RULES="+kit.File(t, "rules.yaml", edgeRules)+monitoring, "\n")...)
		with := func(token string) context.Context {
			return metadata.AppendToOutgoingContext(t.Context(), "authorization", token)
		}
		for token, is := range map[string]struct{ caller, monitor bool }{
			"":              {false, monitoring == ""},
			"Bearer wrong":  {false, monitoring == ""},
			"bearer second": {true, monitoring == ""},
			"Bearer watch":  {false, true},
		} {
			for _, method := range methods {
				admitted := is.caller
				if strings.HasPrefix(method, "/grpc.health.v1.Health/") {
					admitted = is.monitor
				}
				err := invoke(with(token), s, method)
				require.Equal(t, admitted, status.Code(err) != codes.Unauthenticated, "%s with %q: %v", method, token, err)
				require.NotEqual(t, codes.Unimplemented, status.Code(err), method)
				if !admitted {
					requireInfo(t, err, "UNAUTHENTICATED", "")
				}
			}
			authorization := "Authorization: " + token
			requireStatus(t, is.caller, s.mustPost("/v1/acquire", `{"policy":"budget","key":"k"}`, authorization))
			requireStatus(t, is.caller, s.mustPost("/v1/nothing", ``, authorization))
			for _, path := range []string{"/healthz", "/metrics"} {
				requireStatus(t, is.monitor, s.get(path, authorization))
			}
			requireStatus(t, true, s.get("/livez", authorization)) // a probe has no token, and a restart mends none
		}
		twice := metadata.AppendToOutgoingContext(with("Bearer first"), "authorization", "Bearer first")
		_, err := s.call(twice, "acquire", `{"policy":"budget","key":"k"}`)
		require.Equal(t, codes.Unauthenticated, status.Code(err))
	}
	require.EqualValues(t, 2, taken(t, db), "of the second token")
}

// A call that is refused before it is read is counted, though not as one for tokens. One that a page of another site sends through a
// browser is such a call. The log has wrong tokens and who sent them.
func TestRefusals_AreCounted(t *testing.T) {
	_, s := parallel(t, "TOKENS=secret", "MAX_MESSAGE_BYTES=100", "ENVOY_RULES="+kit.File(t, "rules.yaml", edgeRules))
	const token = "Authorization: Bearer secret"
	for _, method := range methods {
		_ = invoke(t.Context(), s, method)
	}
	for _, path := range []string{"/v1/acquire_up_to", "/json", "/v1/nothing"} {
		requireProblem(t, s.mustPost(path, "{}", "Authorization: Bearer wrong"), http.StatusUnauthorized, "")
	}
	require.Equal(t, http.StatusMethodNotAllowed, s.get("/v1/peek", token).status)
	for _, body := range []string{`{"key":"` + strings.Repeat("k", 100) + `"}`, `{"kee":"k"}`, `{"key":"k","cost":1.5}`} {
		s.mustPost("/v1/peek", body, token)
	}
	s.mustPost("/v1/peek", `{"key":"k"}`, token, "Request-Timeout: 1s")
	s.mustPost("/v1/peek", `{"key":"k"}`, token, "Sec-Fetch-Site: cross-site")
	s.mustPost("/v1/peek", `{"key":"k"}`, token, "Origin: https://example.com") // of a browser that does not send the other
	s.mustPost("/json", `{"domain":1}`, token)
	s.mustPost("/v1/nothing", "{}", token) // a path that nothing serves is not counted
	metrics := s.get("/metrics").text
	for _, want := range []string{`UNAUTHENTICATED",operation="acquire"} 1`, `UNAUTHENTICATED",operation="acquire_many"} 1`,
		`UNAUTHENTICATED",operation="acquire_up_to"} 1`, `UNAUTHENTICATED",operation="gate"} 2`, `UNAUTHENTICATED",operation="_other"} 3`, `UNREADABLE",operation="peek"} 4`,
		`UNREADABLE",operation="gate"} 1`, `INVALID_ARGUMENT",operation="peek"} 1`, `FORBIDDEN",operation="peek"} 2`} {
		require.Contains(t, metrics, want+"\n")
	}
	require.Equal(t, 9, strings.Count(metrics, "ratelimit_server_calls_total{"))
	require.NotContains(t, metrics, "ratelimit_requests_total{")
	line := `level=WARN msg="a call is refused: it has no token that the server knows" operation=gate from=127.0.0.1`
	require.Equal(t, 1, strings.Count(s.log.String(), line), "gRPC and JSON have one line a minute: %s", s.log)
	require.NotContains(t, s.log.String(), "wrong")
}

// Another site can point its name to this machine: a browser then treats the calls of its pages as same-origin. Callers with a
// token, and of other addresses, may use any name.
func TestHost_WithoutTokensIsNoNameOnALoopbackListener(t *testing.T) {
	db := parallelDB(t)
	const call = `{"policy":"budget","key":"k"}`
	s := start(t, db.URL, "STATUS_PAGE=true", "MONITORING_TOKENS=watch", "ENVOY_RULES="+kit.File(t, "rules.yaml", edgeRules))
	status := func(s *testServer, method, path, host string) int {
		a := s.mustDo(method, path, call, "Host: "+host, "Authorization: Bearer watch")
		require.Equal(t, a.status == http.StatusForbidden, strings.Contains(a.text, "Without TOKENS"), "%s", a.text)
		return a.status
	}
	for _, host := range []string{"evil.example", "evil.example:8080", "evil.example.", "127.0.0.1.evil.example", "localhost.evil.example:80", "localhost..", "[::1].evil.example"} {
		for path, method := range map[string]string{"/v1/acquire": "POST", "/v1/charge": "POST", "/json": "POST", "/metrics": "GET", "/": "GET", "/v1/nothing": "POST"} {
			require.Equal(t, http.StatusForbidden, status(s, method, path, host), "%s at %s", path, host)
		}
		a := s.mustDo("POST", "/v1/acquire", call, "Host: "+host)
		require.Contains(t, a.body["detail"], fmt.Sprintf("Host is %q.", host))
		require.Contains(t, a.body["detail"], "set TOKENS")
	}
	for _, path := range []string{"/livez", "/healthz"} {
		isWell := func() bool { return status(s, "GET", path, "evil.example") == http.StatusOK }
		require.Eventually(t, isWell, time.Minute, 10*time.Millisecond, "health has nothing to hide, and may be asked by the name in HTTP_ADDR")
	}
	require.Zero(t, taken(t, db))
	hosts := []string{"localhost", "LocalHost:8080", "localhost.", "localhost.:80", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8080", "192.0.2.1"}
	for _, host := range hosts {
		require.Equal(t, http.StatusOK, status(s, "POST", "/v1/acquire", host), host)
		require.Equal(t, http.StatusOK, status(s, "GET", "/metrics", host), host)
	}
	require.EqualValues(t, len(hosts), taken(t, db))
	require.Equal(t, http.StatusOK, status(start(t, db.URL, "TOKENS=watch"), "POST", "/v1/acquire", "limits.example"))
	require.Equal(t, http.StatusOK, status(start(t, db.URL, "HTTP_ADDR=0.0.0.0:0"), "POST", "/v1/acquire", "limits.example"))
}

func requireStatus(t *testing.T, admitted bool, a answer) {
	require.Equal(t, admitted, a.status != http.StatusUnauthorized)
	if !admitted {
		requireProblem(t, a, http.StatusUnauthorized, "")
		require.Equal(t, "Bearer", a.header.Get("WWW-Authenticate"))
	}
}

func TestJSON_MalformedRequests(t *testing.T) {
	_, s := parallel(t)
	for name, body := range map[string]string{
		"nothing":                 ``,
		"no JSON":                 `policy=api&key=k`,
		"half of it":              `{"policy":"api","key":`,
		"more than it":            `{"policy":"api","key":"k"} {}`,
		"no object":               `["api","k"]`,
		"an unknown name":         `{"policy":"api","key":"k","costs":5}`,
		"a name in capitals":      `{"policy":"api","Key":"k"}`,
		"a name that comes twice": `{"policy":"api","key":"k","key":"l"}`,
		"a cost in quotes":        `{"policy":"api","key":"k","cost":"5"}`,
		"a key that is a number":  `{"policy":"api","key":5}`,
		"text that is not UTF-8":  "{\"policy\":\"api\",\"key\":\"\xff\"}",
		"half a surrogate":        `{"policy":"api","key":"\ud800"}`,
		"a deep one":              strings.Repeat(`{"key":`, 100_000),
	} {
		a := s.mustPost("/v1/acquire", body)
		requireProblem(t, a, http.StatusBadRequest, "")
		require.NotContains(t, a.body["detail"], "Go ", name)
	}
	for path, body := range map[string]string{
		"hold":    `{"policy":"jobs","key":"k","holder":"h","lease":60}`,
		"renew":   `{"policy":"jobs","key":"k","holder":"h","cost":1}`,
		"release": `{"policy":"jobs","key":"k","holder":5}`,
	} {
		requireProblem(t, s.mustPost("/v1/"+path, body), http.StatusBadRequest, "")
	}
	for _, key := range []string{"k", "l", "\ufffd"} {
		require.EqualValues(t, 10, s.remaining("api", key), "none of them took anything")
	}
}

func TestHTTP_OtherPathsAndMethods(t *testing.T) {
	_, s := parallel(t)
	for path := range everyCall {
		for _, method := range []string{http.MethodGet, http.MethodPut, http.MethodDelete, http.MethodOptions, "ODD"} {
			a := s.mustDo(method, "/v1/"+path, `{"policy":"api","key":"k"}`)
			requireProblem(t, a, http.StatusMethodNotAllowed, "")
			require.Equal(t, http.MethodPost, a.header.Get("Allow"))
		}
	}
	for _, path := range []string{"/", "/v1", "/v1/", "/v1/acquire/", "/v2/acquire", "/favicon.ico"} {
		a := s.mustPost(path, `{"policy":"api","key":"k"}`)
		requireProblem(t, a, http.StatusNotFound, "")
		for call := range everyCall {
			require.Regexp(t, "(/v1/|, )"+call+`[,.]`, a.body["detail"], "the answer lists all calls")
		}
		for _, page := range []string{"/livez", "/healthz", "/metrics"} {
			require.Contains(t, a.body["detail"], page)
			require.Equal(t, http.StatusOK, s.get(page).status)
		}
	}
}

func TestMessages_TooLarge(t *testing.T) {
	_, s := parallel(t, "MAX_MESSAGE_BYTES=2000")
	body := func(key int) string { return `{"policy":"api","key":"` + strings.Repeat("k", key) + `"}` }
	_, err := s.call(t.Context(), "acquire", body(2000))
	require.Equal(t, codes.ResourceExhausted, status.Code(err), "%v", err)
	for _, length := range []int{2000, 1_000_000} {
		requireProblem(t, s.mustPost("/v1/acquire", body(length)), http.StatusRequestEntityTooLarge, "")
	}
	_, _ = requireError(t, s, "acquire", body(1900), service.InvalidArgument, "22023") // it is read, and the connection goes on
}

// Connections without a complete request delay no caller, and are closed.
func TestListeners_SlowConnections(t *testing.T) {
	db := parallelDB(t)
	s, brief := start(t, db.URL), start(t, db.URL, "CALL_TIMEOUT=1s") // which ends a call whose body does not come
	var slow []net.Conn
	open := func(address net.Addr, begin string) {
		conn := dial(t, address)
		require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
		require.NoError(t, kit.ErrorOf(io.WriteString(conn, begin)))
		slow = append(slow, conn)
	}
	for range 300 {
		open(s.GRPCAddr(), "")
		open(s.GRPCAddr(), "PRI * HTTP/2.0\r\n")
		open(s.HTTPAddr(), "POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\n")
	}
	const half = "POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: 30\r\n\r\n{\"policy\":\"api\""
	for range 300 {
		open(brief.HTTPAddr(), half)
	}
	s.acquire("api", "k")
	require.Equal(t, http.StatusOK, s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`).status)

	var ended sync.WaitGroup
	for _, conn := range slow {
		ended.Go(func() {
			_, err := io.Copy(io.Discard, conn)
			if timeout, ok := err.(net.Error); ok && timeout.Timeout() { //nolint:errorlint // it is not wrapped
				t.Error("the server did not end the connection")
			}
		})
	}
	ended.Wait()
	require.NotContains(t, s.log.String()+brief.log.String(), "level=ERROR", "strangers do not fill the log")
}

// underAttack lets ordinary callers of both protocols go on while attack does what it does. Each of them is answered, memory
// stays bounded, nothing panics, and nobody got tokens that the database did not lose: what callers were told they got,
// what the server counted as granted, and what is gone agree as far as answers can be lost.
func underAttack(t *testing.T, s *testServer, db *pgtest.DB, attack func()) {
	t.Helper()
	var granted atomic.Int64 // to the ordinary callers
	done := make(chan struct{})
	var callers sync.WaitGroup
	for i := range 8 {
		callers.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				allowed, _, err := s.take(context.Background(), i, "budget", fmt.Sprint("ordinary ", i))
				if err != nil || !allowed {
					t.Errorf("an ordinary caller: allowed %t, error %v", allowed, err)
					return
				}
				granted.Add(1)
			}
		})
	}
	var memory runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&memory)
	before := memory.HeapAlloc + memory.StackInuse
	attack()
	runtime.GC()
	runtime.ReadMemStats(&memory)
	// Other tests run in the same process.
	if after := memory.HeapAlloc + memory.StackInuse; after > before+256<<20 {
		t.Errorf("%d MB before, %d MB after", before>>20, after>>20)
	}
	close(done)
	callers.Wait()
	require.Positive(t, granted.Load())
	// The attackers' calls may still be under way.
	require.Eventually(t, func() bool { return scrape(s)["ratelimit_server_calls_under_way"] == "0" }, time.Minute, 10*time.Millisecond)
	counted := kit.NoError(strconv.ParseInt(scrape(s)[`ratelimit_requests_total{policy="budget",result="allowed"}`], 10, 64))(t)
	require.LessOrEqual(t, granted.Load(), counted)
	require.LessOrEqual(t, counted, taken(t, db), "the server has granted what nobody has paid")
	require.NotContains(t, s.log.String(), "panic")
}

// Callers leave at any moment of a call. A grant that they do not read is charged.
func TestAttack_CallersWhoLeave(t *testing.T) {
	db, s := parallel(t)
	underAttack(t, s, db, func() {
		var leaving sync.WaitGroup
		for i := range 16 {
			random := rand.New(rand.NewPCG(9, uint64(i)))
			leaving.Go(func() {
				for range 200 {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(random.IntN(3000))*time.Microsecond)
					_, _, _ = s.take(ctx, i, "budget", "left")
					cancel()
				}
			})
		}
		leaving.Wait()
	})
}

// HTTP clients fill all buffers, and read nothing. Package main has those of gRPC.
func TestAttack_SlowReaders(t *testing.T) {
	db, s := parallel(t, "STOP_TIMEOUT=100ms", "MAX_CALLS=10000")
	underAttack(t, s, db, func() {
		requests := []string{
			strings.Repeat("POST /v1/acquire HTTP/1.1\r\nHost: localhost\r\nContent-Length: 34\r\n\r\n"+`{"policy":"budget","key":"unread"}`, 50),
			strings.Repeat("GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 500), // of which a part fills all buffers
		}
		for i := range 20 {
			conn := dial(t, s.HTTPAddr())
			require.NoError(t, conn.SetReadBuffer(4096))
			if i%2 > 0 {
				require.NoError(t, conn.SetWriteDeadline(time.Now().Add(100*time.Millisecond)))
			}
			_, _ = io.WriteString(conn, requests[i%2]) // until the server reads no more
		}
		db.Await(t, time.Minute, "select (ratelimit_peek('budget', 'unread')).remaining = 1000000 - 10 * 50") // none begins later
	})
	require.NoError(t, s.stop(), "it does not wait for those who do not read")
}

// The client sends each path as it is written. Package auth has the forms of a wrong token.
func TestAttack_TokensOfEveryPath(t *testing.T) {
	db, s := parallel(t, "TOKENS=first,second", "MONITORING_TOKENS=watch", "ENVOY_RULES="+kit.File(t, "rules.yaml", edgeRules))
	send := func(method, path, token string) int {
		r := kit.NoError(http.NewRequestWithContext(t.Context(), method, s.url, strings.NewReader(`{"policy":"budget","key":"k"}`)))(t)
		r.URL.Opaque = path
		r.Header.Set("Authorization", token)
		response, err := s.http.Do(r)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return response.StatusCode
	}
	for _, path := range []string{
		"/v1/acquire", "/v1/acquire_all", "/v1/charge", "/v1/settle", "/v1/peek", "/v1/refund", "/json", "/livez", "/healthz", "/metrics", "/",
		"/v1//acquire", "/./v1/acquire", "/v1/./acquire", "/x/../v1/acquire", "/livez/../v1/acquire", "/metrics/../v1/acquire", "http://x/v1/acquire",
		"/livez/..%2fv1/acquire", "/livez%2f..%2fv1%2facquire", "/%76%31/acquire", "/v1%2facquire", "/V1/ACQUIRE", "/v1/acquire/", "/v1/acquire;x",
		"/v1/acquire%00", "/livez;/v1/acquire", "//livez/v1/acquire", "/livez?/v1/acquire", "/livez#/v1/acquire", `\v1\acquire`,
	} {
		for _, method := range []string{"POST", "GET", "HEAD", "OPTIONS", "PUT", "TRACE"} {
			for _, token := range []string{"", "Bearer firs", "Bearer first,second", "Basic OmZpcnN0", "Bearer watch"} {
				code := send(method, path, token)
				isLive := method != "POST" && (path == "/livez" || strings.HasPrefix(path, "/livez?") || strings.HasPrefix(path, "/livez#"))
				isMonitor := method != "POST" && token == "Bearer watch" && (path == "/healthz" || path == "/metrics")
				if !isLive && !isMonitor {
					require.NotEqual(t, http.StatusOK, code, "%s %s with %q", method, path, token)
				}
				if strings.HasPrefix(path, "/v1/a") && method == "POST" && !strings.Contains(path, "%00") {
					require.Equal(t, http.StatusUnauthorized, code, "%s with %q", path, token)
				}
			}
		}
	}
	require.Zero(t, taken(t, db))
	require.Equal(t, http.StatusOK, send("POST", "/v1/acquire", "Bearer first"))
}

// A proxy and this server must not read two different requests.
func TestAttack_SmuggledRequests(t *testing.T) {
	db, s := parallel(t)
	inner := "POST /v1/charge HTTP/1.1\r\nHost: localhost\r\nContent-Length: 42\r\n\r\n" + `{"policy":"budget","key":"k","cost":1000}` + "\r\n"
	for name, request := range map[string]string{
		"a length and chunks":    "POST /v1/peek HTTP/1.1\r\nHost: localhost\r\nContent-Length: 29\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
		"two lengths":            "POST /v1/peek HTTP/1.1\r\nHost: localhost\r\nContent-Length: 29\r\nContent-Length: 5\r\n\r\n12345" + inner,
		"chunks that are hidden": "POST /v1/peek HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + inner,
		"chunks of two kinds":    "POST /v1/peek HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + inner,
	} {
		conn := dial(t, s.HTTPAddr())
		require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
		// The server ends the connection after the last request at the latest.
		_, _ = io.WriteString(conn, request+"GET /nowhere HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n") // or before it is written
		text, _ := io.ReadAll(conn)
		require.NotContains(t, string(text), " 200 OK", name)
	}
	require.Zero(t, taken(t, db))
}
