package auth_test

import (
	"encoding/base64"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/auth"
)

func TestTokens_AdmitAnyOfTheirs(t *testing.T) {
	t.Parallel()
	two := auth.New("first", "second one")
	for header, want := range map[string]bool{
		"Bearer first":       true,
		"bearer first":       true,
		"Bearer second one":  true,
		"Bearer  first":      false,
		"Bearer first ":      false,
		"Bearer FIRST":       false,
		"Bearer firs":        false,
		"Bearer firstsecond": false,
		"Bearer":             false,
		"Bearer ":            false,
		"first":              false,
		"Basic first":        false,
		"":                   false,
	} {
		require.Equal(t, want, two.Admit([]string{header}), "%q", header)
		require.True(t, auth.New().Admit([]string{header}), "without tokens everybody may call")
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

func TestTokens_AdmitABrowser(t *testing.T) {
	t.Parallel()
	basic := func(pair string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(pair)) }
	two := auth.New("first", "second:one")
	for header, want := range map[string]bool{
		basic("anybody:first"):      true,
		basic(":first"):             true,
		basic("anybody:second:one"): true,
		"Bearer first":              true,
		basic("first:"):             false,
		basic("first"):              false,
		basic("first:anybody"):      false,
		basic("anybody:firs"):       false,
		basic("anybody:"):           false,
		"Basic first":               false,
		"Basic":                     false,
		"":                          false,
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.Header.Set("Authorization", header)
		require.Equal(t, want, two.AdmitBrowser(r), "%q", header)
		require.True(t, auth.New().AdmitBrowser(r), "without tokens everybody may look")
		if header != "Bearer first" {
			require.False(t, two.Admit([]string{header}), "and call nothing")
		}
	}
}

func TestIsAddress_NotWithoutAHost(t *testing.T) {
	t.Parallel()
	require.False(t, auth.IsAddress(""))
}
