package httplimit_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
)

// The handler gets the ResponseWriter of the server, which can flush, hijack and so on, and the request as it was.
func TestStreaming_NothingIsWrapped(t *testing.T) {
	t.Parallel()
	for _, charges := range [][]client.Charge{{}, {{Policy: "api", Key: "k"}}} {
		l := newLimited(t, nil, httplimit.Closed(time.Second))
		w, r := httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		httplimit.New(l, charge(charges...), httplimit.Closed(time.Second))(http.HandlerFunc(func(gotW http.ResponseWriter, gotR *http.Request) {
			l.ran++
			require.Same(t, w, gotW)
			require.Same(t, r, gotR)
			require.NoError(t, gotR.Context().Err())
		})).ServeHTTP(w, r)
		require.Equal(t, 1, l.ran)
	}
}
