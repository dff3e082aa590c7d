package pgtest

import (
	"net"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

var portsGiven sync.Map

// FreePort returns a port of 127.0.0.1 on which nobody listens, and which no other test of this program has been given.
func FreePort(t testing.TB) string {
	for {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		_, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		require.NoError(t, l.Close())
		if _, given := portsGiven.LoadOrStore(port, true); !given {
			return port
		}
	}
}
