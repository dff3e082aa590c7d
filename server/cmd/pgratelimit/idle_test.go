package main

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/tests/kit"
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
	s := serve(t, "DATABASE_URL="+db.URL, "GRPC_ADDR=127.0.0.1:0")
	client := kit.NoError(grpc.NewClient(s.grpc, grpc.WithTransportCredentials(insecure.NewCredentials())))(t)
	defer client.Close()
	call := func() {
		d := kit.NoError(pb.NewRateLimiterClient(client).Acquire(t.Context(), &pb.Request{Policy: "budget", LogicalKey: "k"}))(t)
		require.Equal(t, pb.Verdict_ALLOWED, d.GetVerdict())
		_, text := s.ask(t, "/v1/acquire", `{"policy":"budget","key":"k"}`)
		require.Contains(t, text, `"allowed":true`)
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
	remaining := kit.One[int](t, db.Pool, "select remaining from ratelimit_peek('budget', 'k')")
	require.Equal(t, 1_000_000-2*calls, remaining)
}

// raiseFiles returns how many connections this process may open.
func raiseFiles(t *testing.T) int {
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
	if !isGRPC {
		require.NoError(t, kit.ErrorOf(io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")))
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		require.NoError(t, kit.ErrorOf(io.Copy(io.Discard, response.Body)))
		require.NoError(t, response.Body.Close())
		return
	}
	const settings = "\x00\x00\x00\x04\x00\x00\x00\x00\x00"
	require.NoError(t, kit.ErrorOf(io.WriteString(conn, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"+settings)))
	require.NoError(t, kit.ErrorOf(io.ReadFull(conn, make([]byte, len(settings)))))
}

// metric reads one that has no labels.
func (p *process) metric(t *testing.T, name string) float64 {
	_, text := p.ask(t, "/metrics", "")
	_, value, found := strings.Cut(text, "\n"+name+" ")
	require.True(t, found, name)
	value, _, _ = strings.Cut(value, "\n")
	return kit.NoError(strconv.ParseFloat(value, 64))(t)
}
