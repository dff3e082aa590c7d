package jsonapi_test

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/jsonapi"
)

// What Go, JavaScript and Python write for a number of seconds.
func TestTimeout_TakesADecimalNumberOfSeconds(t *testing.T) {
	t.Parallel()
	ask := func(text string) (status int, given time.Duration) {
		begin := time.Now()
		handler := jsonapi.Timeout(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			deadline, _ := r.Context().Deadline()
			given = deadline.Sub(begin)
		}))
		r := httptest.NewRequest(http.MethodPost, "/", nil)
		r.Header.Set("Request-Timeout", text)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		return w.Code, given
	}
	const hour = 3600.0
	for text, seconds := range map[string]float64{
		"5": 5, "0.5": .5, ".5": .5, "5.": 5, "0.30000000000000004": .3, "1.234567890123456": 1.234567890123456, "999999999": 999999999,
		"5e-05": 0, "1e-7": 0, "1.5e-05": 0, "00.5": .5,
	} {
		status, given := ask(text)
		require.Equal(t, http.StatusOK, status, text)
		require.InDelta(t, seconds, given.Seconds(), hour, text)
		require.GreaterOrEqual(t, given.Seconds(), seconds-1e-6, text)
	}
	for _, text := range []string{"0", "0.0", ".", "-1", "+1", "1s", "0.5 s", "1e3", "1e+3", "e-3", "0x1", "1_0", "NaN", "inf", "1, 2", "9999999999", "½"} {
		status, _ := ask(text)
		require.Equal(t, http.StatusBadRequest, status, text)
	}
}
