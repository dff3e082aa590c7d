package operate

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest"
	"github.com/pgratelimit/pgratelimit/client/httplimit"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// httpItem reads the only item of a field by a parser that is not ours: a name and numbers.
func httpItem(t *testing.T, lines []string) (name string, numbers map[string]any) {
	list := kit.NoError(httpsfv.UnmarshalList(lines))(t)
	require.Len(t, list, 1, "%q", lines)
	item := list[0].(httpsfv.Item)
	numbers = map[string]any{}
	for _, parameter := range item.Params.Names() {
		numbers[parameter], _ = item.Params.Get(parameter)
	}
	return item.Value.(string), numbers
}

func TestHTTP_PolicyNamesOfAnyBytes(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"api":          "api",
		`a"b\c`:        `a"b\c`,
		"50%":          "50%25",
		"größe":        "gr%C3%B6%C3%9Fe",
		"a\r\nX: 1":    "a%0D%0AX: 1",
		"\x01\x7f; q=": "%01%7F; q=",
	} {
		policy := client.Policy{Name: name, Capacity: 3, Refill: 1, Every: time.Minute}
		fake := clienttest.New(func() time.Time { return kit.T0 })
		require.NoError(t, fake.DefinePolicy(t.Context(), policy))
		var violated []string
		handler := httplimit.New(fake, func(*http.Request) []client.Charge {
			return []client.Charge{{Policy: name, Key: "k", Cost: client.Cost(2)}}
		}, httplimit.Closed(time.Minute), httplimit.Policies(policy), httplimit.Observe(func(_ *http.Request, e httplimit.Event) {
			violated = e.Violated()
		}))(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, "/", nil))
		for field, numbers := range map[string]map[string]any{
			"Ratelimit-Policy": {"q": int64(3), "w": int64(180)}, "Ratelimit": {"r": int64(1), "t": int64(60)},
		} {
			gotName, got := httpItem(t, answer.Header()[field])
			require.Equal(t, want, gotName)
			require.Equal(t, numbers, got)
		}
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/", nil))
		require.Equal(t, []string{want}, violated)
	}
}
