package server_test

import (
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	pb "github.com/pgratelimit/pgratelimit/server/gen/pgratelimit/v1"
)

// Connections on which nothing comes, or not all, hold up nobody, and are ended.
func TestListeners_SlowConnections(t *testing.T) {
	t.Parallel()
	db := newDB(t)
	s, brief := start(t, db.URL), start(t, db.URL, "CALL_TIMEOUT=1s") // which ends a call whose body does not come
	var slow []net.Conn
	open := func(address net.Addr, begin string) {
		t.Helper()
		conn, err := net.Dial("tcp", address.String())
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		require.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
		_, err = conn.Write([]byte(begin))
		require.NoError(t, err)
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
	_, err := s.rpc.Acquire(t.Context(), &pb.AcquireRequest{Policy: "api", LogicalKey: "k"})
	require.NoError(t, err)
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
