package auth_test

import (
	"encoding/base64"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/auth"
)

// Whom a header admits: to calls, and to the page.
func TestTokens_AdmitAnyOfTheirs(t *testing.T) {
	t.Parallel()
	basic := func(pair string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(pair)) }
	tokens := auth.New("first", "second one", "third:one")
	for header, to := range map[string]struct{ calls, page bool }{
		"Bearer first":             {true, true},
		"bearer first":             {true, true},
		"Bearer second one":        {true, true},
		basic("anybody:first"):     {false, true},
		basic(":first"):            {false, true},
		basic("anybody:third:one"): {false, true},
		basic("first:"):            {},
		basic("first"):             {},
		basic("first:anybody"):     {},
		basic("anybody:firs"):      {},
		basic("anybody:"):          {},
		"Basic first":              {},
		"Basic":                    {},
		"Bearer  first":            {},
		"Bearer first ":            {},
		"Bearer FIRST":             {},
		"Bearer firs":              {},
		"Bearer firstsecond":       {},
		"Bearer":                   {},
		"Bearer ":                  {},
		"first":                    {},
		"":                         {},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Authorization", header)
		require.Equal(t, to.calls, tokens.Admit([]string{header}), "%q", header)
		require.Equal(t, to.page, tokens.AdmitBrowser(r), "%q", header)
		require.True(t, auth.New().Admit([]string{header}) && auth.New().AdmitBrowser(r), "without tokens everybody may call and look")
	}
}

// A proxy may have checked the other header.
func TestTokens_AdmitNobodyWithTwoHeaders(t *testing.T) {
	t.Parallel()
	tokens := auth.New("token")
	const basic = "Basic OnRva2Vu" // :token
	for _, two := range [][]string{{"Bearer token", "Bearer token"}, {"Bearer token", "Bearer wrong"}, {"Bearer wrong", "Bearer token"}, {"Bearer token", ""}, {basic, basic}} {
		require.False(t, tokens.Admit(two), "%q", two)
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header["Authorization"] = two
		require.False(t, tokens.AdmitBrowser(r), "%q", two)
	}
	require.False(t, tokens.Admit(nil))
	require.True(t, auth.New().Admit(nil))
}

func TestIsAddress_NotWithoutAHost(t *testing.T) {
	t.Parallel()
	require.False(t, auth.IsAddress(""))
}
