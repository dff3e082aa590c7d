package server_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/server/internal/server"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestStart_SaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	db, _, url := newRole(t, "")
	taken := kit.NoError(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer taken.Close()
	for want, c := range map[string][]string{
		"pgratelimit is not installed": {pgtest.Empty(t).URL},
		"the role may not acquire: its owner can run: grant execute on function ratelimit_acquire, ratelimit_acquire_all, ratelimit_acquire_packed to <role>;": {url},
		"the database does not answer":          {"postgres://127.0.0.1:1/none?sslmode=disable"},
		"read-only, so connect to the primary":  {kit.WithSettings(db.URL, "default_transaction_read_only", "on")},
		"DATABASE_URL: ":                        {"postgres://127.0.0.1:port/none"},
		"GRPC_ADDR: ":                           {db.URL, "GRPC_ADDR=" + taken.Addr().String()},
		"HTTP_ADDR: ":                           {db.URL, "HTTP_ADDR=" + taken.Addr().String()},
		"DEFAULT_CAPACITY: the policy default:": {db.URL, "DEFAULT_CAPACITY=9000000000001", "DEFAULT_REFILL_RATE=1"},
	} {
		require.ErrorContains(t, startError(t, c[0], c[1:]...), want)
	}
}

func TestStart_DefinesTheDefaultPolicyOnce(t *testing.T) {
	db := parallelDB(t)
	start(t, db.URL, "DEFAULT_CAPACITY=20", "DEFAULT_REFILL_RATE=0.5")
	s := start(t, db.URL, "DEFAULT_CAPACITY=30", "DEFAULT_REFILL_RATE=1")
	require.EqualValues(t, 20, s.acquire("", "k").GetCapacity())
	require.EqualValues(t, 19, s.mustPost("/v1/peek", `{"key":"k"}`).body["remaining"])
	require.EqualValues(t, 18, s.mustPost("/v1/acquire_all", `{"charges":[{"key":"k"}]}`).body["remaining"])
	require.Equal(t, []string{"1 every 00:00:02"}, kit.Column(t, db, "select refill || ' every ' || every from ratelimit_policies() where policy = 'default'"))
}

func TestStart_AsARoleThatMayOnlyAskForTokens(t *testing.T) {
	t.Parallel()
	_, _, url := newRole(t, strings.Join(kit.ApplicationFunctions(t, newDB(t)), ", "))
	s := start(t, url)
	require.Equal(t, http.StatusOK, s.mustPost("/v1/acquire", `{"policy":"api","key":"k","idempotency_key":"i"}`).status)
	for path, body := range everyCall {
		require.Equal(t, http.StatusOK, s.mustPost("/v1/"+path, body).status, path)
	}
}

func TestStart_OneListenerAlone(t *testing.T) {
	db := parallelDB(t)
	for _, off := range []string{"GRPC_ADDR=off", "HTTP_ADDR=off"} {
		s := kit.NoError(server.Start(t.Context(), load(t, db.URL, off), slog.New(slog.DiscardHandler)))(t)
		require.Equal(t, off == "GRPC_ADDR=off", s.GRPCAddr() == nil)
		require.Equal(t, off == "HTTP_ADDR=off", s.HTTPAddr() == nil)
		require.NoError(t, s.Stop())
	}
}

func TestStart_TLS(t *testing.T) {
	t.Parallel()
	cert, key, pool := kit.Certificate(t)
	trust := &tls.Config{RootCAs: pool}
	s := startWith(t, load(t, newDB(t).URL, "TLS_CERT_FILE="+cert, "TLS_KEY_FILE="+key), grpc.WithTransportCredentials(credentials.NewTLS(trust)))
	require.NoError(t, kit.ErrorOf(s.rpc.Acquire(t.Context(), &pb.Request{Policy: "api", LogicalKey: "k"})))

	require.Equal(t, http.StatusBadRequest, s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`).status, "in the clear")
	s.url = "https://" + s.HTTPAddr().String()
	s.http = &http.Client{Transport: &http.Transport{TLSClientConfig: trust, ForceAttemptHTTP2: true}}
	defer s.http.CloseIdleConnections()
	a := s.mustPost("/v1/acquire", `{"policy":"api","key":"k"}`)
	require.EqualValues(t, 8, a.body["remaining"])
}

// Under load, a caller gets the answer to each grant in the database.
func TestStop_LosesNoAnswer(t *testing.T) {
	t.Parallel()
	const callers, enough = 48, 2000
	for range 3 {
		db := newDB(t)
		s := start(t, db.URL, "NO_FLUSH=true")
		var granted atomic.Int64
		var loaded sync.WaitGroup
		isUnderLoad := make(chan struct{})
		for i := range callers {
			loaded.Go(func() {
				for {
					allowed, _, err := s.take(context.Background(), i, "budget", fmt.Sprint("k", i/2))
					if err != nil {
						if _, isGRPC := status.FromError(err); isGRPC && status.Code(err) != codes.Unavailable {
							t.Errorf("%v", err)
						}
						return // what kind of error it is by JSON, taken tells below
					}
					if !allowed {
						t.Errorf("caller %d is not allowed", i)
					} else if granted.Add(1) == enough {
						close(isUnderLoad)
					}
				}
			})
		}
		<-isUnderLoad
		require.NoError(t, s.stop())
		loaded.Wait()
		require.Equal(t, granted.Load(), taken(t, db), "tokens that were taken, and nobody was told")
		for _, address := range []string{s.GRPCAddr().String(), s.HTTPAddr().String()} {
			_, err := net.Dial("tcp", address)
			require.ErrorIs(t, err, syscall.ECONNREFUSED)
		}
	}
}

func TestStop_WaitsForCallsUnderWay(t *testing.T) {
	db, s := parallel(t, "DATABASE_CALLS=4")
	unlock := lock(t, db)
	grpcAnswered := s.begin(t.Context(), "acquire", `{"policy":"budget","key":"k"}`)
	answered := s.beginPost(t.Context(), "/v1/charge", `{"policy":"budget","key":"l","cost":1}`)
	awaitBlocked(t, db, 2)
	stopped := beside(s.stop)
	require.Eventually(t, func() bool { // no more calls get in
		_, grpcErr := net.Dial("tcp", s.GRPCAddr().String())
		_, httpErr := net.Dial("tcp", s.HTTPAddr().String())
		return errors.Is(grpcErr, syscall.ECONNREFUSED) && errors.Is(httpErr, syscall.ECONNREFUSED)
	}, 20*time.Second, time.Millisecond)
	require.Empty(t, stopped)
	unlock()
	require.NoError(t, <-grpcAnswered)
	require.NoError(t, <-answered)
	require.NoError(t, <-stopped)
	require.EqualValues(t, 2, taken(t, db))
}

// STOP_TIMEOUT bounds the wait, and the error has the number of calls without an answer.
func TestStop_EndsWhatTakesTooLong(t *testing.T) {
	db, s := parallel(t, "STOP_TIMEOUT=50ms")
	unlock := lock(t, db)
	grpcAnswered := s.begin(t.Context(), "acquire", `{"policy":"budget","key":"k"}`)
	awaitBlocked(t, db, 1)
	answered := s.beginPost(t.Context(), "/v1/charge", `{"policy":"budget","key":"l","cost":1}`)
	awaitBlocked(t, db, 2)
	require.ErrorContains(t, s.Stop(), "2 calls were not answered within STOP_TIMEOUT")
	s.stop = func() error { return nil }
	require.Error(t, <-grpcAnswered)
	require.Error(t, <-answered)
	awaitBlocked(t, db, 0)
	unlock()
	require.Zero(t, taken(t, db))
}

func TestStop_DoesNotWaitForIdleConnections(t *testing.T) {
	_, s := parallel(t, "STOP_TIMEOUT=100ms")
	for _, address := range []net.Addr{s.GRPCAddr(), s.HTTPAddr()} {
		for range 50 {
			dial(t, address)
		}
	}
	require.NoError(t, s.stop())
}

func TestStop_LeavesNoGoroutines(t *testing.T) {
	db := newDB(t)
	require.NoError(t, db.Pool.Ping(t.Context()))
	before := goleak.IgnoreCurrent()
	for range 2 {
		t.Run("", func(t *testing.T) {
			s := start(t, db.URL)
			var callers sync.WaitGroup
			for i := range 100 {
				callers.Go(func() {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if i%3 == 0 {
						go cancel()
					}
					_, _, _ = s.take(ctx, i, "budget", "k")
				})
			}
			callers.Wait()
			stream := s.stream(t.Context())
			stream.send(1, "k")
			require.EqualValues(t, 1, stream.granted()) // and it stays open
			s.get("/metrics")
		})
	}
	kit.RequireNoLeak(t, before)
}
