// Package auth checks bearer tokens.
package auth

import (
	"crypto/sha256"
	"crypto/subtle"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// Tokens are bearer tokens. A caller needs one of them; an empty list admits every caller.
type Tokens struct{ hashes [][sha256.Size]byte }

// New returns Tokens.
func New(tokens ...string) Tokens {
	var t Tokens
	for _, token := range tokens {
		t.hashes = append(t.hashes, sha256.Sum256([]byte(token)))
	}
	return t
}

// Admit reports whether the only Authorization header has one of the tokens. Two headers are rejected: a proxy may have checked the
// other. The time it takes does not depend on how much of a token is right.
func (t Tokens) Admit(authorization []string) bool {
	if t.IsOpen() || len(authorization) != 1 {
		return t.IsOpen()
	}
	scheme, token, _ := strings.Cut(authorization[0], " ")
	return strings.EqualFold(scheme, "Bearer") && t.has(token)
}

// AdmitBrowser also admits a token as the password of HTTP Basic, with any user name. A browser then sends it by itself, also for
// pages of other sites: use AdmitBrowser only for requests that change nothing.
func (t Tokens) AdmitBrowser(r *http.Request) bool {
	given := r.Header.Values("Authorization")
	_, password, isBasic := r.BasicAuth()
	return t.Admit(given) || len(given) == 1 && isBasic && t.has(password)
}

// IsOpen reports whether no token is needed.
func (t Tokens) IsOpen() bool { return len(t.hashes) == 0 }

func (t Tokens) has(token string) bool {
	given := sha256.Sum256([]byte(token))
	admitted := 0
	for i := range t.hashes {
		admitted |= subtle.ConstantTimeCompare(given[:], t.hashes[i][:])
	}
	return admitted == 1
}

// IsAddress reports whether a Host is an address, or localhost. Any other name may belong to a site that has pointed it here.
func IsAddress(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.Trim(host, "[]"), ".")
	_, err := netip.ParseAddr(host)
	return err == nil || strings.EqualFold(host, "localhost")
}
