package httplimit_test

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// serve runs a handler behind the middleware, in a real server.
func serve(t *testing.T, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	fake := clienttest.New(nil)
	require.NoError(t, fake.DefinePolicy(t.Context(), api))
	server := httptest.NewServer(httplimit.New(fake, httplimit.Per("api", httplimit.ByIP(0)), httplimit.Closed(time.Minute))(handler))
	t.Cleanup(server.Close)
	return server
}

func fetch(t *testing.T, server *httptest.Server) *http.Response {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
	require.NoError(t, err)
	response, err := server.Client().Do(request)
	require.NoError(t, err)
	return response
}

func body(t testing.TB, response *http.Response) string {
	t.Helper()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return string(text)
}

// The client reads each part before the handler writes the next.
func TestStreaming_FlushAndDeadlines(t *testing.T) {
	t.Parallel()
	next := make(chan struct{})
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		controller := http.NewResponseController(w)
		if controller.SetWriteDeadline(time.Now().Add(time.Minute)) != nil || controller.SetReadDeadline(time.Now().Add(time.Minute)) != nil ||
			controller.EnableFullDuplex() != nil {
			panic(http.ErrAbortHandler)
		}
		for _, part := range []string{"one\n", "two\n"} {
			_, _ = io.WriteString(w, part)
			if controller.Flush() != nil {
				panic(http.ErrAbortHandler)
			}
			<-next
		}
		w.(http.Flusher).Flush()
	})
	response := fetch(t, server)
	defer response.Body.Close()
	require.Equal(t, `"api";r=99;t=1`, response.Header.Get("RateLimit"))
	lines := bufio.NewReader(response.Body)
	for _, part := range []string{"one\n", "two\n"} {
		line, err := lines.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, part, line)
		next <- struct{}{}
	}
}

func TestStreaming_Hijack(t *testing.T) {
	t.Parallel()
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, buffer, err := w.(http.Hijacker).Hijack()
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		_, _ = buffer.WriteString("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhijacked")
		_ = buffer.Flush()
		_ = conn.Close()
	})
	response := fetch(t, server)
	defer response.Body.Close()
	require.Equal(t, "hijacked", body(t, response))
}

func TestStreaming_ReadFrom(t *testing.T) {
	t.Parallel()
	server := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.(io.ReaderFrom).ReadFrom(strings.NewReader("read"))
	})
	response := fetch(t, server)
	defer response.Body.Close()
	require.Equal(t, "read", body(t, response))
}

// The handler gets what the server made, and the request as it was.
func TestStreaming_NothingIsWrapped(t *testing.T) {
	t.Parallel()
	type mark struct{}
	l := newLimited(t, charge(client.Charge{Policy: "api", Key: "k"}), httplimit.Closed(time.Second))
	l.define(api)
	w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(context.WithValue(t.Context(), mark{}, 1), http.MethodGet, "/", nil)
	seen := false
	httplimit.New(l, charge(client.Charge{Policy: "api", Key: "k"}), httplimit.Closed(time.Second))(
		http.HandlerFunc(func(gotW http.ResponseWriter, gotR *http.Request) {
			seen = true
			require.Same(t, w, gotW)
			require.Same(t, r, gotR)
			require.NoError(t, gotR.Context().Err())
		})).ServeHTTP(w, r)
	require.True(t, seen)
}
