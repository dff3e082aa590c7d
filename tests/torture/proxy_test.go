package torture

import (
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// odds of so many in a thousand make faults.
type odds map[kit.Fault]int

func (o odds) random(random *rand.Rand) kit.Faults {
	var mu sync.Mutex
	return func(reply bool) kit.Fault {
		mu.Lock()
		defer mu.Unlock()
		n := random.IntN(1000)
		for f := kit.Delay; f <= kit.Vanish; f++ {
			if n -= o[f]; n >= 0 {
				continue
			}
			if f == kit.Swallow && !reply {
				break
			}
			return f
		}
		return kit.Pass
	}
}

// nextReply does one fault to the next reply of the server.
func nextReply(f kit.Fault) kit.Faults {
	var done atomic.Bool
	return func(reply bool) kit.Fault {
		if reply && done.CompareAndSwap(false, true) {
			return f
		}
		return kit.Pass
	}
}

func newProxy(t testing.TB, db *kit.TestDB) *kit.Proxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &kit.Proxy{
		Listener: listener,
		Server:   &db.Pool.Config().ConnConfig.Config,
		Lines:    make(map[*kit.Line]struct{}),
	}
	p.Heal()
	p.Running.Go(p.Serve)
	t.Cleanup(p.Close)
	return p
}
