package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// perConnection is what an idle one may cost the program, in bytes. With the race detector it costs six times as much.
const perConnection = 256 << 10

// Ten thousand connections on which nothing more comes cost memory, and each of them no more than it may. Those who call are
// served all the while, and what they are granted is charged.
func TestServe_TenThousandIdleConnections(t *testing.T) {
	count := raiseFiles(t)
	db := pgtest.New(t)
	db.Exec(t, "select ratelimit_define_policy('budget', 1000000, 0, '1 day')")
	s := startAttacked(t, db)
	call := func() {
		t.Helper()
		d, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "budget", LogicalKey: "k"})
		require.NoError(t, err)
		require.Equal(t, pb.Verdict_ALLOWED, d.GetVerdict())
		require.Contains(t, s.post(t, `{"policy":"budget","key":"k"}`), `"allowed":true`)
	}
	call()
	before := s.metric(t, "process_resident_memory_bytes")
	calls := 1
	for i := range count {
		conn, err := net.Dial("tcp", []string{s.grpc, s.http}[i%2])
		require.NoError(t, err, "connection %d", i)
		t.Cleanup(func() {
			_ = conn.(*net.TCPConn).SetLinger(0) // no port stays behind
			conn.Close()
		})
		require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
		greet(t, conn, i%2 == 0)
		if i%1000 == 999 {
			call()
			calls++
		}
	}
	require.GreaterOrEqual(t, s.metric(t, "process_open_fds"), float64(count), "they are all there")
	grown := s.metric(t, "process_resident_memory_bytes") - before
	t.Logf("%d idle connections: %.0f MB, %.1f kB each", count, grown/1e6, grown/1e3/float64(count))
	require.Less(t, grown, float64(count*perConnection))
	var remaining int
	require.NoError(t, db.Pool.QueryRow(t.Context(), "select remaining from ratelimit_peek('budget', 'k')").Scan(&remaining))
	require.Equal(t, 1_000_000-2*calls, remaining)
}

// raiseFiles returns how many connections this process may open.
func raiseFiles(t *testing.T) int {
	t.Helper()
	const wanted, others = 10_000, 500
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	limit.Cur = limit.Max
	if limit.Max < wanted+others {
		limit = syscall.Rlimit{Cur: wanted + others, Max: wanted + others}
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil { // the machine has few
		require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	}
	count := min(wanted, int(limit.Cur)-others)
	require.Greater(t, count, others, "too few files may be open")
	return count
}

// greet does what clients do when they connect, and waits until the server has seen it.
func greet(t *testing.T, conn net.Conn, isGRPC bool) {
	t.Helper()
	if !isGRPC {
		_, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
		require.NoError(t, err)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		return
	}
	const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	_, err := io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+settings)
	require.NoError(t, err)
	_, err = io.ReadFull(conn, make([]byte, len(settings)))
	require.NoError(t, err)
}

// An attacked is the program, with a client of each kind.
type attacked struct {
	grpc, http string
	rpc        pb.RateLimiterClient
}

func startAttacked(t *testing.T, db *pgtest.DB, settings ...string) *attacked {
	t.Helper()
	s := &attacked{grpc: "127.0.0.1:" + pgtest.FreePort(t), http: "127.0.0.1:" + pgtest.FreePort(t)}
	program, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	c := exec.CommandContext(ctx, program, "serve")
	c.Env = append(append(os.Environ(), asProgram+"=1", "DATABASE_URL="+db.URL, "GRPC_ADDR="+s.grpc, "HTTP_ADDR="+s.http, "CALL_TIMEOUT=1m"), settings...)
	var log strings.Builder
	var logging sync.Mutex
	c.Stderr = writer(func(p []byte) (int, error) {
		logging.Lock()
		defer logging.Unlock()
		return log.Write(p)
	})
	require.NoError(t, c.Start())
	t.Cleanup(func() {
		cancel()
		_ = c.Wait() // it was killed
		logging.Lock()
		defer logging.Unlock()
		if strings.Contains(log.String(), "panic") || t.Failed() {
			t.Errorf("%s", log.String())
		}
	})
	require.Eventually(t, func() bool {
		response, err := http.Get("http://" + s.http + "/livez")
		return err == nil && response.Body.Close() == nil
	}, 30*time.Second, 10*time.Millisecond)
	conn, err := grpc.NewClient(s.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	s.rpc = pb.NewRateLimiterClient(conn)
	return s
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func (s *attacked) post(t *testing.T, body string) string {
	t.Helper()
	response, err := http.Post("http://"+s.http+"/v1/acquire", "application/json", strings.NewReader(body))
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return string(text)
}

// metric reads one that has no labels.
func (s *attacked) metric(t *testing.T, name string) float64 {
	t.Helper()
	response, err := http.Get("http://" + s.http + "/metrics")
	require.NoError(t, err)
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	for lines.Scan() {
		if text, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			value, err := strconv.ParseFloat(text, 64)
			require.NoError(t, errors.Join(err, lines.Err()))
			return value
		}
	}
	require.Fail(t, fmt.Sprintf("no metric %s", name))
	return 0
}
