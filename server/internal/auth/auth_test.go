package auth_test

import (
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
		require.Equal(t, want, two.Admit(header), "%q", header)
		require.True(t, auth.New().Admit(header), "without tokens everybody may call")
	}
}
