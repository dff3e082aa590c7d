package server_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
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
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

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

// A peer speaks HTTP/2 to the gRPC listener, frame by frame, as no client would.
type peer struct {
	net.Conn
	*http2.Framer
	headers bytes.Buffer
	encoder *hpack.Encoder
	stream  uint32
}

func newPeer(t *testing.T, s *testServer, settings ...http2.Setting) *peer {
	conn := patient{dial(t, s.GRPCAddr())}
	p := &peer{Conn: conn, Framer: http2.NewFramer(conn, bufio.NewReader(conn)), stream: 1}
	p.encoder = hpack.NewEncoder(&p.headers)
	require.NoError(t, kit.ErrorOf(io.WriteString(conn, http2.ClientPreface)))
	require.NoError(t, p.WriteSettings(settings...))
	return p
}

// A patient connection waits a minute for each frame that it writes, and for the end after the last one.
type patient struct{ net.Conn }

func (c patient) Write(b []byte) (int, error) {
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

func (p *peer) begin(end bool, more ...string) error {
	p.headers.Reset()
	fields := append([]string{":method", "POST", ":scheme", "http", ":path", pb.RateLimiter_Acquire_FullMethodName, ":authority", "x",
		"content-type", "application/grpc", "te", "trailers"}, more...)
	for i := 0; i < len(fields); i += 2 {
		_ = p.encoder.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]}) // a buffer has room
	}
	return p.WriteHeaders(http2.HeadersFrameParam{StreamID: p.stream, BlockFragment: p.headers.Bytes(), EndHeaders: end})
}

// call sends a whole call, for which nobody waits.
func (p *peer) call(message []byte) error {
	if err := p.begin(true); err != nil {
		return err
	}
	frame := append([]byte{0, 0, 0, 0, 0}, message...)
	binary.BigEndian.PutUint32(frame[1:], uint32(len(message)))
	if err := p.WriteData(p.stream, true, frame); err != nil {
		return err
	}
	p.stream += 2
	return nil
}

func acquireMessage(t *testing.T, key string) []byte {
	return kit.NoError(proto.Marshal(&pb.Request{Policy: "budget", LogicalKey: key}))(t)
}

// A peer writes frames for as long as the server reads them. The server ends some of these connections.
func TestAttack_HTTP2Floods(t *testing.T) {
	message := acquireMessage(t, "reset")
	bomb := strings.Split(strings.Repeat("bomb,"+strings.Repeat("a", 4000)+",", 1000), ",")
	type flood struct {
		times        int
		begin, write func(*peer) error
	}
	kit.InParallel(t, map[string]flood{
		"rapid reset": {20_000, nil, func(p *peer) error {
			if err := p.call(message); err != nil {
				return err
			}
			return p.WriteRSTStream(p.stream-2, http2.ErrCodeCancel)
		}},
		"pings": {20_000, nil, func(p *peer) error { return p.WritePing(false, [8]byte{}) }},
		"headers that never end": {20_000, func(p *peer) error { return p.begin(false) }, func(p *peer) error {
			return p.WriteContinuation(p.stream, false, bytes.Repeat([]byte{0, 1, 'a', 1, 'a'}, 200))
		}},
		"headers that are a bomb": {200, func(p *peer) error { return p.begin(true, bomb[:2]...) }, func(p *peer) error {
			p.stream += 2
			return p.begin(true, bomb[:2000]...)
		}},
		"a message that says it is long": {1000, nil, func(p *peer) error {
			p.stream += 2
			if err := p.begin(true); err != nil {
				return err
			}
			return p.WriteData(p.stream, false, []byte{0, 0xff, 0xff, 0xff, 0xff})
		}},
	}, func(t *testing.T, f flood) {
		db := newDB(t)
		s := start(t, db.URL)
		underAttack(t, s, db, func() {
			p := newPeer(t, s)
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_, _ = io.Copy(io.Discard, p.Conn) // until the server has ended the connection
			}()
			var err error
			if f.begin != nil {
				err = f.begin(p)
			}
			for n := 0; n < f.times && err == nil; n++ {
				err = f.write(p)
			}
			if err == nil {
				p.Close() // it was let do all of that
			} else if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
				t.Error("the server neither reads nor ends the connection")
			}
			<-ended
		})
	})
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

// gRPC clients with windows of 0 bytes, and HTTP clients that fill all buffers.
func TestAttack_SlowReaders(t *testing.T) {
	db, s := parallel(t, "STOP_TIMEOUT=100ms", "MAX_CALLS=10000")
	underAttack(t, s, db, func() {
		message := acquireMessage(t, "unread")
		for range 50 {
			p := newPeer(t, s, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0})
			for range 20 { // of all connections 1000
				require.NoError(t, p.call(message))
			}
		}
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
		db.Await(t, time.Minute, "select (ratelimit_peek('budget', 'unread')).remaining = 1000000 - 1000 - 10 * 50") // none begins later
	})
	require.NoError(t, s.stop(), "it does not wait for those who do not read")
}

// A wrong request does not fail the right ones in the same batch.
func TestAttack_BadRequestsAmongGoodOnes(t *testing.T) {
	db, s := parallel(t)
	long := strings.Repeat("k", 1_000_000)
	bad := []*pb.Request{
		{Policy: "budget", LogicalKey: ""},
		{Policy: "budget", LogicalKey: "a\x00b"},
		{Policy: "budget", LogicalKey: long},
		{Policy: "budget", LogicalKey: strings.Repeat("k", 513)},
		{Policy: "budget", LogicalKey: "k", RequestId: new("")},
		{Policy: "budget", LogicalKey: "k", RequestId: new(long)},
		{Policy: "budget", LogicalKey: "k", Cost: new(int64(-1 << 63))},
		{Policy: long, LogicalKey: "k"},
		{Policy: "BUDGET", LogicalKey: "k"},
		{Policy: "budget'; select ratelimit_reset('budget', 'ordinary 0'); --", LogicalKey: "k"},
		{Policy: "{budget}", LogicalKey: "{k,l}"},
	}
	underAttack(t, s, db, func() {
		var senders sync.WaitGroup
		for i := range 16 {
			senders.Go(func() {
				for n := range 40 {
					q := bad[(i*7+n)%len(bad)]
					_, err := s.rpc.Acquire(t.Context(), q)
					if code := status.Code(err); code != codes.InvalidArgument && code != codes.NotFound {
						t.Errorf("%.50q: %v", q, err)
					}
				}
			})
		}
		senders.Wait()
	})
	of := kit.One[int64](t, db.Pool, "select count(*) from ratelimit_status('budget', 10000) where key !~ '^ordinary [0-7]$'")
	require.Zero(t, of, "a bad request has a bucket")
}

// The client sends each path as it is written. Package auth has the forms of a wrong token.
func TestAttack_TokensOfEveryPath(t *testing.T) {
	db, s := parallel(t, "TOKENS=first,second", "MONITORING_TOKENS=watch", "ENVOY_RULES="+rulesFile(t, edgeRules))
	send := func(method, path, token string) int {
		r := kit.NoError(http.NewRequestWithContext(t.Context(), method, s.url, strings.NewReader(`{"policy":"budget","key":"k"}`)))(t)
		r.URL.Opaque = path
		r.Header.Set("Authorization", token)
		response := kit.NoError(s.http.Do(r))(t)
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
				isMonitor := method != "POST" && token == "Bearer watch" && (strings.HasPrefix(path, "/livez") || path == "/healthz" || path == "/metrics")
				if !isMonitor {
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
