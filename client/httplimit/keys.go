package httplimit

import (
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"unicode/utf8"
)

// A Key names the bucket of a request, in 1 to 512 bytes. [ByIP] and [ByUser] make a Key. It returns text of
// that length for anything that the client sends.
type Key func(*http.Request) string

// maxLength is the longest key of a bucket, in bytes.
const maxLength = 512

// fits reports whether text may be a key.
func fits(text string) bool {
	return 0 < len(text) && len(text) <= maxLength && utf8.ValidString(text) && strings.IndexByte(text, 0) < 0
}

// ByUser names the bucket of the user that the function returns, "user:" and its name. A name that is too long
// for a key, or no text, becomes "user-sha256:" and its hash. When the function returns nothing, the other key
// is the request's.
//
// The function must return a name that the program has verified, such as the subject of a token with a checked
// signature. A client that can choose its name has as many buckets as it likes.
func ByUser(user func(*http.Request) string, otherwise Key) Key {
	if user == nil || otherwise == nil {
		panic("httplimit: ByUser: no function")
	}
	return func(r *http.Request) string {
		name := user(r)
		if name == "" {
			return otherwise(r)
		}
		if key := "user:" + name; fits(key) {
			return key
		}
		hash := sha256.Sum256([]byte(name))
		return "user-sha256:" + hex.EncodeToString(hash[:])
	}
}

// ByIP is [ByNetwork] with the /64 of an IPv6 address: one customer has at least a /64.
func ByIP(trustedProxies int) Key { return ByNetwork(trustedProxies, 64) }

// ByNetwork names the bucket of the client's address, such as "ip:192.0.2.1". Of an IPv6 address it is the network of so many bits, 1
// to 128, such as "ip:2001:db8::/64". A customer who has a /56 or a /48 has as many buckets as that has networks of this size.
//
// Without proxies it is the address of the connection. With n trusted proxies before the program it is the n-th
// address of X-Forwarded-For, counted from the end: each proxy adds the address that it was called from, and
// the client may have written anything before. Count exactly the proxies that every request passes. With
// too many, clients choose their address. With too few, all clients have the address of a proxy.
//
// Without proxies, the first request that has the field is logged: a proxy may have been forgotten.
//
// A request that came past the proxies, and has fewer addresses, or none there, has the address of its
// connection. A connection without an address, such as a Unix socket, is "ip:unknown".
func ByNetwork(trustedProxies, ipv6Bits int) Key {
	if trustedProxies < 0 {
		panic("httplimit: a negative number of proxies")
	}
	if ipv6Bits < 1 || ipv6Bits > 128 {
		panic("httplimit: ByNetwork: an IPv6 network has 1 to 128 bits")
	}
	var once sync.Once
	return func(r *http.Request) string {
		forwarded := r.Header["X-Forwarded-For"]
		if trustedProxies == 0 && len(forwarded) > 0 {
			once.Do(func() { slog.Warn(untold) })
		}
		if trustedProxies > 0 {
			if ip, ok := parseIP(fromEnd(forwarded, trustedProxies)); ok {
				return nameOf(ip, ipv6Bits)
			}
		}
		if ip, ok := parseIP(r.RemoteAddr); ok {
			return nameOf(ip, ipv6Bits)
		}
		return "ip:unknown" // a socket of the machine has no address
	}
}

const untold = "rate limit: a request has X-Forwarded-For, and ByIP trusts no proxy: behind one, all clients share its address; " +
	"pass their number, such as ByIP(1)"

// fromEnd is the n-th element from the end of a list in several lines, or nothing.
func fromEnd(lines []string, n int) string {
	list := strings.Join(lines, ",")
	for ; n > 1; n-- {
		comma := strings.LastIndexByte(list, ',')
		if comma < 0 {
			return ""
		}
		list = list[:comma]
	}
	return strings.Trim(list[strings.LastIndexByte(list, ',')+1:], " \t")
}

// parseIP reads an address, perhaps with a port.
func parseIP(text string) (ip netip.Addr, ok bool) {
	if ip, err := netip.ParseAddr(text); err == nil {
		return ip, true
	}
	host, _, err := net.SplitHostPort(text)
	if err != nil {
		host = strings.TrimSuffix(strings.TrimPrefix(text, "["), "]")
	}
	ip, err = netip.ParseAddr(host)
	return ip, err == nil
}

func nameOf(ip netip.Addr, ipv6Bits int) string {
	ip = ip.Unmap().WithZone("")
	if ip.Is4() {
		return "ip:" + ip.String()
	}
	network, _ := ip.Prefix(ipv6Bits) // fails for longer ones than the address
	return "ip:" + network.String()
}
